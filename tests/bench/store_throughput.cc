// Writes a file into a store and reads it back: store_throughput URL BYTES. One JSON line: seconds
// and CPU seconds of this process for both; the content is checked.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <sys/resource.h>

#include "common/store/open_store.h"

namespace {

constexpr int64_t kBlockBytes = 8 << 20;  // as the writer of checkpoints

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Taken {
  double seconds = 0;
  double cpu_seconds = 0;
};

template <typename Work>
absl::Status Measure(Taken& taken, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  const double cpu = CpuSeconds();
  const absl::Status status = work();
  taken.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  taken.cpu_seconds = CpuSeconds() - cpu;
  return status;
}

absl::Status Run(const std::string& url, int64_t bytes) {
  ASSIGN_OR_RETURN(const auto store, ravel::store::OpenStore(url));
  RETURN_IF_ERROR(store->MakeRoot());
  RETURN_IF_ERROR(ravel::store::WithdrawIfThere(*store, "throughput"));
  std::vector<std::byte> block(static_cast<size_t>(kBlockBytes));
  for (size_t i = 0; i < block.size(); ++i) {
    block[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  }
  Taken write;
  const absl::Status written = Measure(write, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const auto writer, store->Create("throughput", bytes));
    for (int64_t at = 0; at < bytes; at += kBlockBytes) {
      RETURN_IF_ERROR(writer->Append(block));
    }
    return writer->Finish();
  });
  RETURN_IF_ERROR(written);
  Taken read;
  const absl::Status came_back = Measure(read, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const auto reader, store->Open("throughput"));
    std::vector<std::byte> found(block.size());
    for (int64_t at = 0; at < bytes; at += kBlockBytes) {
      RETURN_IF_ERROR(reader->ReadAt(at, found));
      if (std::memcmp(found.data(), block.data(), block.size()) != 0) {
        return absl::DataLossError("other bytes came back");
      }
    }
    return absl::OkStatus();
  });
  RETURN_IF_ERROR(came_back);
  const double megabytes = static_cast<double>(bytes) / 1e6;
  std::printf(
      "{\"write_mb_s\": %.1f, \"write_cpu_s_gb\": %.3f, \"read_mb_s\": %.1f, "
      "\"read_cpu_s_gb\": %.3f}\n",
      megabytes / write.seconds,
      write.cpu_seconds * 1000 / megabytes,
      megabytes / read.seconds,
      read.cpu_seconds * 1000 / megabytes);
  return store->Withdraw("throughput");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || std::atoll(argv[2]) < kBlockBytes) {
    std::fprintf(stderr, "store_throughput URL BYTES (8 MiB and more, rounded up to 8 MiB)\n");
    return 2;
  }
  const int64_t bytes = (std::atoll(argv[2]) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  const absl::Status status = Run(argv[1], bytes);
  if (!status.ok()) {
    std::fprintf(stderr, "store_throughput: %s\n", std::string(status.message()).c_str());
  }
  return status.ok() ? 0 : 1;
}
