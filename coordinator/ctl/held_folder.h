#pragma once

// A folder that is written under a name of its own until it is whole.

#include <memory>
#include <string>

#include "common/status.h"

namespace ravel::ctl {

// Holds the lock of a mark in the folder, so that a later process can tell what a killed one left
// from what a running one writes. Thread-compatible.
class HeldFolder {
 public:
  // Makes the folder. One that is there is removed first if it has the mark and nobody holds it;
  // else AlreadyExists, and nothing has changed.
  static absl::StatusOr<std::unique_ptr<HeldFolder>> Make(const std::string& path);
  ~HeldFolder();
  HeldFolder(const HeldFolder&) = delete;
  HeldFolder& operator=(const HeldFolder&) = delete;

  // Takes the mark out of a folder that is whole. It is held on.
  absl::Status TakeMarkOut();

 private:
  HeldFolder(std::string mark, int fd);

  const std::string mark_;
  const int fd_;
};

}  // namespace ravel::ctl
