#pragma once

// checkpoints list, show, verify, export, copy, pin, unpin, unmark: by job through the coordinator,
// by path without one. rollback: by job only.

#include "coordinator/ctl/checkpoint_mark.h"
#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct CheckpointVerbOptions {
  std::string target = {};  // a job's name, or a path or URL (one with a '/', or ".")
  std::string tensors = {};
  bool quick = false;
  bool all = false;
  std::string format = "huggingface";
  std::string output = {};
  std::string dtype = "f32";
  bool quantized = false;
  std::string reader = "transformers";
  int64_t step = -1;
  std::string reason = {};
  std::string to = {};  // "step=N"; of a copy, a folder
};

int RunCheckpointsList(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsShow(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsVerify(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsExport(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsCopy(const CommonOptions& common, const CheckpointVerbOptions& options);
int RunCheckpointsMark(const CommonOptions& common,
                       const CheckpointVerbOptions& options,
                       CheckpointMark mark);
int RunRollback(const CommonOptions& common, const CheckpointVerbOptions& options);

}  // namespace ravel::ctl
