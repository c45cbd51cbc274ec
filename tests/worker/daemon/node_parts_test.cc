// The parts of the daemon that need no coordinator.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/testing/process.h"
#include "worker/daemon/child_process.h"
#include "worker/daemon/device_probe.h"
#include "worker/daemon/exit_reason.h"
#include "worker/daemon/log_relay.h"
#include "worker/daemon/shared_gpu.h"

namespace ravel::daemon {
namespace {

TEST(ExitReasonTest, EveryDocumentedCodeHasItsReason) {
  const std::vector<std::pair<int, std::string>> codes = {{0, "Done"},
                                                          {10, "Stopped"},
                                                          {11, "CommError"},
                                                          {12, "DeviceError"},
                                                          {13, "DataError"},
                                                          {14, "NonFinitePersistent"},
                                                          {15, "HostOutOfMemory"},
                                                          {16, "PlanRejected"},
                                                          {17, "StoreUnavailable"},
                                                          {70, "ProcessCrash"},
                                                          {1, "ProcessCrash"},
                                                          {255, "ProcessCrash"}};
  for (const auto& [code, reason] : codes) {
    EXPECT_EQ(ExitReason({.exit_code = code, .signal = 0}), reason) << code;
  }
  EXPECT_EQ(ExitReason({.exit_code = -1, .signal = 9}), "ProcessCrash");
  EXPECT_EQ(ExitText({.exit_code = -1, .signal = 9}), "signal 9 (Killed)");
  EXPECT_EQ(ExitText({.exit_code = 13, .signal = 0}), "exit code 13");
}

TEST(BoundedLogFileTest, KeepsFourFilesAtMost) {
  testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/logs/rank-0.log";
  {
    BoundedLogFile file(path, 100);
    for (int i = 0; i < 100; ++i) {
      file.Append(std::string(19, static_cast<char>('a' + i % 26)));
    }
  }
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path() + "/logs")) {
    ++files;
    EXPECT_LE(entry.file_size(), 100u);
  }
  EXPECT_EQ(files, 4);
  EXPECT_EQ(testing::ReadText(path).back(), '\n');
}

TEST(BoundedLogFileTest, FileThatCannotBeWrittenIsNotAnError) {
  BoundedLogFile file("/proc/none/rank-0.log");
  file.Append("a line");
}

TEST(SharedGpuTest, EveryTrainerIsAHostOfItsOwnOnLoopback) {
  const std::vector<std::string> variables = SharedGpuEnvironment("job-2-1");
  for (const char* wanted :
       {"NCCL_HOSTID=job-2-1", "NCCL_NET=Socket", "NCCL_SOCKET_IFNAME=lo", "NCCL_IB_DISABLE=1"}) {
    EXPECT_NE(std::find(variables.begin(), variables.end(), wanted), variables.end()) << wanted;
  }
}

TEST(SharedGpuTest, GpusAreOfferedSeveralTimesWithTheirPartOfTheMemory) {
  NodeFacts facts = {.devices = {{.kind = "cpu", .model = "", .memory_bytes = 5, .uuid = ""},
                                 {.kind = "gpu", .model = "", .memory_bytes = 90, .uuid = "a"},
                                 {.kind = "gpu", .model = "", .memory_bytes = 60, .uuid = "b"}},
                     .device_message = "",
                     .cpu_isa = "",
                     .host_id = ""};
  ShareGpus(3, facts);
  ASSERT_EQ(facts.devices.size(), 7u);
  EXPECT_EQ(facts.devices[0].memory_bytes, 5);
  for (size_t i = 1; i < 7; ++i) {
    EXPECT_EQ(facts.devices[i].uuid, i < 4 ? "a" : "b");
    EXPECT_EQ(facts.devices[i].memory_bytes, i < 4 ? 30 : 20);
  }
}

// What a child's shell prints for the command.
std::string OutputOfChild(const std::string& command, const std::vector<std::string>& variables) {
  const auto child = StartChild({"/bin/sh", "-c", command}, variables);
  if (!child.ok()) {
    return std::string(child.status().message());
  }
  std::string text(200, '\0');
  size_t length = 0;
  for (ssize_t count = 1; count > 0; length += static_cast<size_t>(std::max<ssize_t>(count, 0))) {
    count = read(child->out, text.data() + length, text.size() - length);
  }
  waitpid(child->pid, nullptr, 0);
  for (const int fd : {child->pidfd, child->socket, child->out, child->err}) {
    close(fd);
  }
  return text.substr(0, length);
}

TEST(ChildProcessTest, WarningsOfNcclReachTheLogUnlessTheDaemonSaysOtherwise) {
  unsetenv("NCCL_DEBUG");
  EXPECT_EQ(OutputOfChild("echo $NCCL_DEBUG", {}), "WARN\n");
  setenv("NCCL_DEBUG", "INFO", 1);
  EXPECT_EQ(OutputOfChild("echo $NCCL_DEBUG", {}), "INFO\n");
  unsetenv("NCCL_DEBUG");
}

TEST(ChildProcessTest, EachStreamOfADeviceHasAQueueUnlessTheDaemonSaysOtherwise) {
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  EXPECT_EQ(OutputOfChild("echo $CUDA_DEVICE_MAX_CONNECTIONS", {}), "32\n");
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
  EXPECT_EQ(OutputOfChild("echo $CUDA_DEVICE_MAX_CONNECTIONS", {}), "8\n");
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
}

TEST(ChildProcessTest, SecretsOfTheDaemonAreNotForJobs) {
  const char* secrets[] = {"AWS_SECRET_ACCESS_KEY", "https_proxy", "KUBERNETES_SERVICE_HOST"};
  for (const char* name : secrets) {
    setenv(name, "secret", 1);
  }
  setenv("NCCL_SOCKET_IFNAME", "eth0", 1);
  EXPECT_EQ(
      OutputOfChild("env | grep -c secret; echo $NCCL_SOCKET_IFNAME; [ -n \"$PATH\" ] && echo path",
                    {}),
      "0\neth0\npath\n");
  for (const char* name : secrets) {
    unsetenv(name);
  }
  unsetenv("NCCL_SOCKET_IFNAME");
}

TEST(ChildProcessTest, HasTheLimitsThatTheDaemonMayGive) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low = {.rlim_cur = std::min<rlim_t>(before.rlim_max, 256),
                      .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  const std::string files = OutputOfChild("ulimit -S -n", {});
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(files, std::to_string(std::min<rlim_t>(before.rlim_max, 65536)) + "\n");
  EXPECT_EQ(OutputOfChild("[ \"$(ulimit -S -l)\" = \"$(ulimit -H -l)\" ] && echo equal", {}),
            "equal\n");
}

TEST(ChildProcessTest, VariablesOfTheCallerComeBeforeThoseOfTheDaemon) {
  setenv("NCCL_NET", "of the daemon", 1);
  setenv("NCCL_COMM_ID", "10.0.0.1:7", 1);
  EXPECT_EQ(
      OutputOfChild("echo $NCCL_NET $NCCL_COMM_ID $NCCL_HOSTID", SharedGpuEnvironment("job-2-1")),
      "Socket job-2-1\n");
  unsetenv("NCCL_NET");
  unsetenv("NCCL_COMM_ID");
}

TEST(DeviceProbeTest, GpusAreThoseThatCudaGivesPrograms) {
  std::vector<DeviceFacts> all;
  for (const char* uuid : {"GPU-a0", "GPU-b1", "GPU-b2"}) {
    all.push_back({.kind = "gpu", .model = "H200", .memory_bytes = 1, .uuid = uuid});
  }
  const auto seen = [&](const char* visible) {
    std::string uuids;
    for (const DeviceFacts& device : VisibleGpus(all, visible)) {
      uuids += device.uuid.substr(4) + " ";
    }
    return uuids;
  };
  EXPECT_EQ(seen(nullptr), "a0 b1 b2 ");
  EXPECT_EQ(seen("2,0"), "b2 a0 ");
  EXPECT_EQ(seen("GPU-b2, GPU-a"), "b2 a0 ");
  EXPECT_EQ(seen("1,7,0"), "b1 ");
  EXPECT_EQ(seen(""), "");
  EXPECT_EQ(seen("-1"), "");
}

TEST(DeviceProbeTest, WhatCudaHidesIsNamed) {
  std::vector<DeviceFacts> all(2);
  all[0].uuid = "GPU-a0";
  all[1].uuid = "GPU-b1";
  EXPECT_EQ(WordWithoutGpu(all, nullptr), "");
  EXPECT_EQ(WordWithoutGpu(all, "1, GPU-a"), "");
  EXPECT_EQ(WordWithoutGpu(all, "0,2,1"), "2");
  EXPECT_EQ(WordWithoutGpu(all, "MIG-a0/1/0"), "MIG-a0/1/0");
}

// With these variables, asks the emulated driver.
NodeFacts ProbeEmulated(const std::vector<std::pair<const char*, const char*>>& variables) {
  for (const auto& [name, value] : variables) {
    setenv(name, value, 1);
  }
  NodeFacts facts = ProbeNode(0, RAVEL_EMULATED_NVML);
  for (const auto& [name, value] : variables) {
    unsetenv(name);
  }
  return facts;
}

TEST(DeviceProbeTest, GpusThatNoTrainerCanHaveAreLeftOutAndNamed) {
  const NodeFacts whole = ProbeEmulated({{"RAVEL_EMULATED_DEVICES", "4"}});
  ASSERT_EQ(whole.devices.size(), 4u);
  EXPECT_EQ(whole.device_message, "");
  const NodeFacts few = ProbeEmulated(
      {{"RAVEL_EMULATED_DEVICES", "4"}, {"RAVEL_EMULATED_LOST", "1"}, {"RAVEL_EMULATED_MIG", "3"}});
  ASSERT_EQ(few.devices.size(), 2u);
  EXPECT_EQ(few.devices[1].uuid, whole.devices[2].uuid);
  EXPECT_EQ(few.device_message,
            "GPU 1 is left out: GPU is lost; GPU 3 is left out: it is cut into MIG devices, which "
            "are not supported");
}

TEST(DeviceProbeTest, WordsOfCudasVariableThatHideGpusAreNamed) {
  const auto message = [](const char* visible) {
    return ProbeEmulated({{"RAVEL_EMULATED_DEVICES", "2"}, {"CUDA_VISIBLE_DEVICES", visible}})
        .device_message;
  };
  EXPECT_EQ(message("1,GPU-emulated-0"), "");
  EXPECT_EQ(message("MIG-4,0"),
            "CUDA_VISIBLE_DEVICES: \"MIG-4\" is a MIG device, which is not supported; it hides "
            "itself and all that follow");
  EXPECT_EQ(message("0,9"),
            "CUDA_VISIBLE_DEVICES: \"9\" names no GPU of this machine; it hides itself and all "
            "that follow");
  EXPECT_EQ(message(""), "CUDA_VISIBLE_DEVICES hides all 2 devices");
  EXPECT_EQ(message("-1"), "CUDA_VISIBLE_DEVICES hides all 2 devices");
}

TEST(DeviceProbeTest, CpuDevicesShareTheMemoryOfTheHost) {
  const NodeFacts one = ProbeNode(1);
  const NodeFacts two = ProbeNode(2);
  ASSERT_GE(one.devices.size(), 1u);
  ASSERT_GE(two.devices.size(), 2u);
  EXPECT_EQ(one.devices[0].kind, "cpu");
  EXPECT_FALSE(one.devices[0].model.empty());
  EXPECT_GT(one.devices[0].memory_bytes, 0);
  EXPECT_EQ(two.devices[0].memory_bytes, one.devices[0].memory_bytes / 2);
  EXPECT_NE(two.devices[0].uuid, two.devices[1].uuid);
  EXPECT_EQ(one.host_id, two.host_id);
  EXPECT_THAT(one.host_id, ::testing::HasSubstr("/pid:["));
  const bool has_gpu = one.devices.size() > 1;
  EXPECT_EQ(one.device_message.empty(), has_gpu) << one.device_message;
}

}  // namespace
}  // namespace ravel::daemon
