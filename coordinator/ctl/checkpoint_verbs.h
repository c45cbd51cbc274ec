#pragma once

// checkpoints list, show, verify, export: by job through the coordinator, by path without one.

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct CheckpointVerbOptions {
  std::string target = {};  // a job's name, or a path (one with a '/', or "." or "file://...")
  std::string tensors = {};
  bool quick = false;
  std::string format = "huggingface";
  std::string output = {};
  std::string dtype = "f32";
};

int RunCheckpointsList(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsShow(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsVerify(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsExport(const CommonOptions& common, const CheckpointVerbOptions& options);

}  // namespace ravel::ctl
