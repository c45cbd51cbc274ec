// Linux writes the node of a PCI device to bus/pci/devices/ADDRESS/numa_node (-1 where it has
// none), and the processors of a node to devices/system/node/nodeN/cpulist.

#include "worker/shard/numa_node.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ravel::shard {
namespace {

constexpr int kDefaultPolicy = 0;    // of linux/mempolicy.h
constexpr int kPreferredPolicy = 1;  // likewise
constexpr int kMostNodes = 64;       // that a word of bits names

std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return std::string(absl::StripAsciiWhitespace(line));
}

}  // namespace

std::vector<int> ParseCpuList(std::string_view text) {
  std::vector<int> cpus;
  const absl::string_view list(text.data(), text.size());
  for (const absl::string_view range : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    int first = 0;
    int last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first || last >= CPU_SETSIZE) {
      return {};
    }
    for (int cpu = first; cpu <= last; ++cpu) {
      cpus.push_back(cpu);
    }
  }
  return cpus;
}

NumaNode NodeOfDevice(const std::string& pci, const std::string& system) {
  NumaNode node;
  const std::string nodes = system + "/devices/system/node";
  if (pci.empty() || !std::filesystem::exists(nodes + "/node1")) {
    return node;
  }
  const std::string text =
      ReadLine(absl::StrCat(system, "/bus/pci/devices/", absl::AsciiStrToLower(pci), "/numa_node"));
  int index = -1;
  if (!absl::SimpleAtoi(text, &index) || index < 0 || index >= kMostNodes) {
    return node;
  }
  node.cpus = ParseCpuList(ReadLine(absl::StrCat(nodes, "/node", index, "/cpulist")));
  node.index = node.cpus.empty() ? -1 : index;
  return node;
}

PreferNode::PreferNode(const NumaNode& node) {
  if (node.index >= 0) {
    const unsigned long mask = 1UL << node.index;  // NOLINT(google-runtime-int): the kernel's word
    set_ = ::syscall(SYS_set_mempolicy, kPreferredPolicy, &mask, kMostNodes + 1) == 0;
  }
}

PreferNode::~PreferNode() {
  if (set_) {
    ::syscall(SYS_set_mempolicy, kDefaultPolicy, nullptr, 0);
  }
}

}  // namespace ravel::shard
