#pragma once

// Tables of jobs, nodes and checkpoints, for people.

#include <vector>

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

enum class Columns { kUsual, kWide };
inline Columns ColumnsOf(const CommonOptions& common) {
  return common.wide ? Columns::kWide : Columns::kUsual;
}

Table JobTable(const std::vector<JobView>& jobs, bool with_namespace, Columns columns);
Table NodeTable(const std::vector<NodeView>& nodes, Columns columns);
Table StepTable(const std::vector<CheckpointView>& checkpoints, Columns columns);

}  // namespace ravel::ctl
