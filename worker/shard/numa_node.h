#pragma once

// The part of a host's memory and processors that a device is attached to.

#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel::shard {

struct NumaNode {
  int index = -1;         // none: the host has one, or does not say
  std::vector<int> cpus;  // of it
};

// The node of a PCI device ("0000:17:00.0"), by what Linux says below `system`. No node where the
// host has only one.
NumaNode NodeOfDevice(const std::string& pci, const std::string& system = "/sys");
// "0-3,8,10-11" as Linux writes lists of processors; empty for what is none, or names one beyond
// those that a set can hold.
std::vector<int> ParseCpuList(std::string_view text);

// While it lives, pages that this thread touches first come from the node, as long as that has any.
class PreferNode {
 public:
  explicit PreferNode(const NumaNode& node);
  ~PreferNode();
  PreferNode(const PreferNode&) = delete;
  PreferNode& operator=(const PreferNode&) = delete;

 private:
  bool set_ = false;
};

}  // namespace ravel::shard
