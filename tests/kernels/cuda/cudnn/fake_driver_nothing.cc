// Functions that cuDNN looks up by name and that a driver without a device has nothing to do for.
// Apart from fake_driver.cc, because cuda.h declares them with arguments.

#define RAVEL_DOES_NOTHING(name) \
  int name() {                   \
    return 0;                    \
  }

extern "C" {

RAVEL_DOES_NOTHING(cuCtxGetCurrent)
RAVEL_DOES_NOTHING(cuCtxGetLimit)
RAVEL_DOES_NOTHING(cuCtxPopCurrent)
RAVEL_DOES_NOTHING(cuCtxPushCurrent)
RAVEL_DOES_NOTHING(cuDeviceGet)
RAVEL_DOES_NOTHING(cuKernelGetAttribute)
RAVEL_DOES_NOTHING(cuKernelSetAttribute)
RAVEL_DOES_NOTHING(cuLaunchCooperativeKernel)
RAVEL_DOES_NOTHING(cuLaunchKernel)
RAVEL_DOES_NOTHING(cuLaunchKernelEx)
RAVEL_DOES_NOTHING(cuLibraryLoadFromFile)
RAVEL_DOES_NOTHING(cuLibraryUnload)
RAVEL_DOES_NOTHING(cuLinkAddData)
RAVEL_DOES_NOTHING(cuLinkComplete)
RAVEL_DOES_NOTHING(cuLinkCreate)
RAVEL_DOES_NOTHING(cuLinkDestroy)
RAVEL_DOES_NOTHING(cuOccupancyMaxPotentialClusterSize)
RAVEL_DOES_NOTHING(cuStreamGetCtx)

}  // extern "C"
