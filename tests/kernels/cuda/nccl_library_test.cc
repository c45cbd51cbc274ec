// NCCL's table of functions: which library is opened, and why none is.

#include "kernels/cuda/nccl_library.h"

#include <cstdlib>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::kernels::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(NcclLibraryTest, ChosenLibraryIsOpenedAndTellsItsVersion) {
  unsetenv("RAVEL_EMULATED_NCCL_VERSION");
  const NcclLibrary library = OpenNccl(RAVEL_EMULATED_NCCL_LIBRARY);
  EXPECT_THAT(library.missing, IsEmpty());
  EXPECT_EQ(library.version, 22809);
  NcclId id = {};
  EXPECT_EQ(library.functions.unique_id(&id), kNcclSuccess);
  EXPECT_STREQ(library.functions.error_text(kNcclInvalidUsage), "invalid usage");
}

TEST(NcclLibraryTest, MissingLibrarySaysWhatWasSoughtAndWhere) {
  const NcclLibrary library = OpenNccl("/nowhere/libnccl.so.2");
  EXPECT_THAT(library.missing, HasSubstr("NCCL not found"));
  EXPECT_THAT(library.missing, HasSubstr("RAVEL_NCCL_LIBRARY"));
  EXPECT_THAT(library.missing, HasSubstr("/nowhere/libnccl.so.2 ("));
  EXPECT_THAT(library.missing, HasSubstr("No such file")) << "the loader's own reason";
}

TEST(NcclLibraryTest, WithoutAChoiceTheLoaderIsAskedThenTheToolkit) {
  setenv("CUDA_HOME", "/nowhere/cuda", 1);
  const NcclLibrary library = OpenNccl("");
  unsetenv("CUDA_HOME");
  if (library.missing.empty()) {  // this machine has one, in the last of the places
    EXPECT_THAT(NcclVersionFault(library.version), IsEmpty());
    return;
  }
  EXPECT_THAT(library.missing, HasSubstr("tried libnccl.so.2 ("));
  EXPECT_THAT(library.missing, HasSubstr(" /nowhere/cuda/lib64/libnccl.so.2 ("));
  EXPECT_THAT(library.missing, HasSubstr(" /usr/local/cuda/lib64/libnccl.so.2 ("));
}

TEST(NcclLibraryTest, LibraryWithoutTheFunctionsIsRefusedByName) {
  const NcclLibrary library = OpenNccl(RAVEL_FAKE_CUDA_LIBRARY);
  EXPECT_THAT(library.missing, HasSubstr("has no ncclGetVersion"));
}

TEST(NcclLibraryTest, VersionsThatAreTooOldOrBrokenAreRefused) {
  EXPECT_THAT(NcclVersionFault(22602), HasSubstr("version 2.26.2, needed is 2.27.0 or later"));
  EXPECT_THAT(NcclVersionFault(22805), HasSubstr("2.28.3 to 2.28.8 are refused"));
  EXPECT_THAT(NcclVersionFault(30100), HasSubstr("needed is NCCL 2"));
  for (const int fine : {22700, 22802, 22809, 23000}) {
    EXPECT_THAT(NcclVersionFault(fine), IsEmpty()) << fine;
  }
  setenv("RAVEL_EMULATED_NCCL_VERSION", "22602", 1);
  const NcclLibrary library = OpenNccl(RAVEL_EMULATED_NCCL_LIBRARY);
  unsetenv("RAVEL_EMULATED_NCCL_VERSION");
  EXPECT_THAT(library.missing, HasSubstr(RAVEL_EMULATED_NCCL_LIBRARY));
  EXPECT_THAT(library.missing, HasSubstr("version 2.26.2"));
}

}  // namespace
}  // namespace ravel::kernels::cuda
