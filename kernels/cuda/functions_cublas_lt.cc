// cuBLASLt, opened when the first gemm needs it: the library works without it, and says so. All
// gemms are row-major, which is what cuBLASLt calls column-major with both operands swapped.

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include <dlfcn.h>

#include <cublasLt.h>

#include "common/gemm_scales.h"
#include "kernels/cuda/functions.h"

namespace ravel::kernels::cuda {
namespace {

// common/dtype.h
constexpr int32_t kFp16 = 2;
constexpr int32_t kBf16 = 3;
constexpr int32_t kPackedE2M1 = 12;  // u8
constexpr int32_t kE4M3 = 14;
constexpr int32_t kE5M2 = 15;
constexpr int kMaxDevices = 64;

struct Functions {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetVersion) version = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) description_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) description_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) description_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
};

struct Library {
  Functions functions;
  std::string missing;  // why there is none; empty if there is
};

template <typename Function>
void Find(void* handle, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr && missing.empty()) {
    missing = std::string("libcublasLt.so.13 has no ") + name;
  }
}

// An explicit setting, the loader's own search, the toolkit's folder.
void* OpenLibrary(std::string& missing) {
  std::vector<std::string> paths;
  const char* chosen = std::getenv("RAVEL_CUBLASLT_LIBRARY");
  if (chosen != nullptr && *chosen != '\0') {
    paths.push_back(chosen);
  } else {
    paths = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"};
  }
  missing = "cuBLASLt not found; tried";
  for (const std::string& path : paths) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) {
      missing.clear();
      return handle;
    }
    missing += " " + path + " (" + dlerror() + ")";
  }
  return nullptr;
}

Library MakeLibrary() {
  Library library;
  void* handle = OpenLibrary(library.missing);
  if (handle == nullptr) {
    return library;
  }
  Functions& f = library.functions;
  Find(handle, "cublasLtCreate", f.create, library.missing);
  Find(handle, "cublasLtGetVersion", f.version, library.missing);
  Find(handle, "cublasLtMatmul", f.matmul, library.missing);
  Find(handle, "cublasLtMatmulDescCreate", f.description_create, library.missing);
  Find(handle, "cublasLtMatmulDescDestroy", f.description_destroy, library.missing);
  Find(handle, "cublasLtMatmulDescSetAttribute", f.description_set, library.missing);
  Find(handle, "cublasLtMatrixLayoutCreate", f.layout_create, library.missing);
  Find(handle, "cublasLtMatrixLayoutDestroy", f.layout_destroy, library.missing);
  Find(handle, "cublasLtMatmulPreferenceCreate", f.preference_create, library.missing);
  Find(handle, "cublasLtMatmulPreferenceDestroy", f.preference_destroy, library.missing);
  Find(handle, "cublasLtMatmulPreferenceSetAttribute", f.preference_set, library.missing);
  Find(handle, "cublasLtMatmulAlgoGetHeuristic", f.heuristic, library.missing);
  return library;
}

const Library& TheLibrary() {
  static const Library library = MakeLibrary();
  return library;
}

int32_t ErrorOf(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? 0 : kCublasLtErrors + static_cast<int32_t>(status);
}

// One per device, for the process.
int32_t HandleOf(int32_t device, cublasLtHandle_t* handle) {
  if (!TheLibrary().missing.empty()) {
    return Fail(TheLibrary().missing);
  }
  if (device < 0 || device >= kMaxDevices) {
    return cudaErrorInvalidDevice;
  }
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) {
    return error;
  }
  static std::mutex mutex;
  static std::array<cublasLtHandle_t, kMaxDevices> handles = {};
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& made = handles[static_cast<size_t>(device)];
  const cublasStatus_t status =
      made != nullptr ? CUBLAS_STATUS_SUCCESS : TheLibrary().functions.create(&made);
  *handle = made;
  return ErrorOf(status);
}

cudaDataType_t TypeOf(int32_t type) {
  switch (type) {
    case kFp16:
      return CUDA_R_16F;
    case kBf16:
      return CUDA_R_16BF;
    case kE4M3:
      return CUDA_R_8F_E4M3;
    case kE5M2:
      return CUDA_R_8F_E5M2;
    case kPackedE2M1:
      return CUDA_R_4F_E2M1;
    default:
      return CUDA_R_32F;
  }
}

static_assert(static_cast<int>(ScaleForm::kTensor) == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
static_assert(static_cast<int>(ScaleForm::kBlocks16) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
static_assert(static_cast<int>(ScaleForm::kBlocks32) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
static_assert(static_cast<int>(ScaleForm::kBlocks128) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
static_assert(static_cast<int>(ScaleForm::kSquares128) ==
              CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);

bool OfCodes(const RavelCudaGemm& gemm) {
  return gemm.b_type != 0;
}

// Such codes have a scale of the whole beside those of blocks, so the factors of the product and of
// the result lie in memory of the device.
bool FactorsOnDevice(const RavelCudaGemm& gemm) {
  return gemm.b_type == kPackedE2M1;
}

// Where a description has a scale, for proposals, which read none: codes have one.
const RavelCudaGemmBuffers kAnyBuffers = {.a = nullptr,
                                          .b = nullptr,
                                          .c = nullptr,
                                          .workspace = nullptr,
                                          .workspace_bytes = 0,
                                          .scale_a = reinterpret_cast<const void*>(256),
                                          .scale_b = reinterpret_cast<const void*>(256),
                                          .factors = nullptr};

// The descriptors of a gemm; status says whether all could be made.
class Description {
 public:
  Description(const RavelCudaGemm& gemm, const RavelCudaGemmBuffers& buffers)
      : f_(TheLibrary().functions) {
    Check(f_.description_create(&matmul_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    // Operands swapped: cuBLASLt's A is b.
    SetMatmul(CUBLASLT_MATMUL_DESC_TRANSA, gemm.transpose_b != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
    SetMatmul(CUBLASLT_MATMUL_DESC_TRANSB, gemm.transpose_a != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (gemm.multiprocessors > 0) {
      SetMatmul(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, gemm.multiprocessors);
    }
    const int64_t a_rows = gemm.transpose_a != 0 ? gemm.k : gemm.m;
    const int64_t a_columns = gemm.transpose_a != 0 ? gemm.m : gemm.k;
    const int64_t b_rows = gemm.transpose_b != 0 ? gemm.n : gemm.k;
    const int64_t b_columns = gemm.transpose_b != 0 ? gemm.k : gemm.n;
    if (OfCodes(gemm)) {
      DescribeCodes(gemm, buffers);
    }
    SetLayout(
        first_, OfCodes(gemm) ? gemm.b_type : gemm.input_type, b_rows, b_columns, gemm.b_stride);
    SetLayout(second_, gemm.input_type, a_rows, a_columns, gemm.a_stride);
    SetLayout(result_, gemm.output_type, gemm.m, gemm.n, gemm.c_stride);
  }
  ~Description() {
    for (const cublasLtMatrixLayout_t layout : {first_, second_, result_}) {
      if (layout != nullptr) {
        f_.layout_destroy(layout);
      }
    }
    if (matmul_ != nullptr) {
      f_.description_destroy(matmul_);
    }
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  int32_t error() const { return ErrorOf(status_); }
  cublasLtMatmulDesc_t matmul() const { return matmul_; }
  cublasLtMatrixLayout_t first() const { return first_; }
  cublasLtMatrixLayout_t second() const { return second_; }
  cublasLtMatrixLayout_t result() const { return result_; }

 private:
  void Check(cublasStatus_t status) {
    if (status_ == CUBLAS_STATUS_SUCCESS) {
      status_ = status;
    }
  }
  // A scale for each operand, in fp32, which is the default mode, or scales of blocks. Sums in full
  // unless they may be fast.
  void DescribeCodes(const RavelCudaGemm& gemm, const RavelCudaGemmBuffers& buffers) {
    const int8_t fast = gemm.fast_accumulation != 0 ? 1 : 0;
    const void* first = buffers.scale_b;
    const void* second = buffers.scale_a;
    SetBytes(CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast));
    SetBytes(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &first, sizeof(first));
    SetBytes(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &second, sizeof(second));
    if (FactorsOnDevice(gemm)) {
      SetMatmul(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    }
    if (gemm.a_form != 0 || gemm.b_form != 0) {
      SetMatmul(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, gemm.b_form);
      SetMatmul(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, gemm.a_form);
    }
  }
  void SetBytes(cublasLtMatmulDescAttributes_t attribute, const void* value, size_t bytes) {
    if (status_ == CUBLAS_STATUS_SUCCESS) {
      Check(f_.description_set(matmul_, attribute, value, bytes));
    }
  }
  template <typename Value>
  void SetMatmul(cublasLtMatmulDescAttributes_t attribute, Value value) {
    if (status_ == CUBLAS_STATUS_SUCCESS) {
      const int32_t word = static_cast<int32_t>(value);
      Check(f_.description_set(matmul_, attribute, &word, sizeof(word)));
    }
  }
  void SetLayout(
      cublasLtMatrixLayout_t& layout, int32_t type, int64_t rows, int64_t columns, int64_t stride) {
    if (status_ == CUBLAS_STATUS_SUCCESS) {
      Check(f_.layout_create(&layout,
                             TypeOf(type),
                             static_cast<uint64_t>(columns),
                             static_cast<uint64_t>(rows),
                             stride));
    }
  }

  const Functions& f_;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
  cublasLtMatmulDesc_t matmul_ = nullptr;
  cublasLtMatrixLayout_t first_ = nullptr;
  cublasLtMatrixLayout_t second_ = nullptr;
  cublasLtMatrixLayout_t result_ = nullptr;
};

// Limits the choice of algorithms: no sum over k is split between blocks, so that bits do not
// depend on timing.
class Preference {
 public:
  Preference(const RavelCudaGemm& gemm, uint64_t workspace_bytes) : f_(TheLibrary().functions) {
    status_ = f_.preference_create(&preference_);
    Set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    Set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
    Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(gemm.b_align));
    Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(gemm.a_align));
    Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(gemm.c_align));
    Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(gemm.c_align));
  }
  ~Preference() {
    if (preference_ != nullptr) {
      f_.preference_destroy(preference_);
    }
  }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  int32_t error() const { return ErrorOf(status_); }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  template <typename Value>
  void Set(cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    if (status_ == CUBLAS_STATUS_SUCCESS) {
      status_ = f_.preference_set(preference_, attribute, &value, sizeof(value));
    }
  }
  const Functions& f_;
  cublasStatus_t status_;
  cublasLtMatmulPreference_t preference_ = nullptr;
};

static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(RavelCudaAlgorithm::words));

}  // namespace

int32_t GemmVersion(uint64_t* version) {
  if (!TheLibrary().missing.empty()) {
    return Fail(TheLibrary().missing);
  }
  *version = TheLibrary().functions.version();
  return 0;
}

int32_t GemmCandidates(int32_t index,
                       const RavelCudaGemm* gemm,
                       uint64_t workspace_bytes,
                       RavelCudaAlgorithm* algorithms,
                       int32_t limit,
                       int32_t* count) {
  *count = 0;
  cublasLtHandle_t handle = nullptr;
  int32_t error = HandleOf(index, &handle);
  if (error != 0) {
    return error;
  }
  const Description description(*gemm, kAnyBuffers);
  const Preference preference(*gemm, workspace_bytes);
  error = description.error() != 0 ? description.error() : preference.error();
  if (error != 0) {
    return error;
  }
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(limit));
  int found = 0;
  const cublasStatus_t status = TheLibrary().functions.heuristic(handle,
                                                                 description.matmul(),
                                                                 description.first(),
                                                                 description.second(),
                                                                 description.result(),
                                                                 description.result(),
                                                                 preference.get(),
                                                                 limit,
                                                                 results.data(),
                                                                 &found);
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) {
      RavelCudaAlgorithm& algorithm = algorithms[(*count)++];
      std::memcpy(algorithm.words, &result.algo, sizeof(algorithm.words));
      algorithm.workspace_bytes = result.workspaceSize;
    }
  }
  return status == CUBLAS_STATUS_NOT_SUPPORTED ? 0 : ErrorOf(status);
}

int32_t GemmRun(void* stream,
                const RavelCudaGemm* gemm,
                const RavelCudaAlgorithm* algorithm,
                const RavelCudaGemmBuffers* buffers) {
  const StreamHandle* on = static_cast<StreamHandle*>(stream);
  cublasLtHandle_t handle = nullptr;
  const int32_t error = HandleOf(on->device, &handle);
  if (error != 0) {
    return error;
  }
  const Description description(*gemm, *buffers);
  if (description.error() != 0) {
    return description.error();
  }
  if (FactorsOnDevice(*gemm) && buffers->factors == nullptr) {
    return Fail("a gemm of packed codes without factors");
  }
  cublasLtMatmulAlgo_t chosen;
  std::memcpy(&chosen, algorithm->words, sizeof(chosen));
  const float one = 1.0f;
  const float beta = gemm->accumulate != 0 ? 1.0f : 0.0f;
  const bool on_device = FactorsOnDevice(*gemm);
  return ErrorOf(TheLibrary().functions.matmul(handle,
                                               description.matmul(),
                                               on_device ? buffers->factors : &one,
                                               buffers->b,
                                               description.first(),
                                               buffers->a,
                                               description.second(),
                                               on_device ? buffers->factors + 1 : &beta,
                                               buffers->c,
                                               description.result(),
                                               buffers->c,
                                               description.result(),
                                               &chosen,
                                               buffers->workspace,
                                               buffers->workspace_bytes,
                                               on->stream));
}

}  // namespace ravel::kernels::cuda
