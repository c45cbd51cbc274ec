#pragma once

// Views of the controller as messages of proto/jobs.proto.

#include "coordinator/jobs/job_controller.h"
#include "proto/jobs.pb.h"

namespace ravel::coordinator {

v1::Job ToProto(const JobView& view);
// For lists: with labels, without spec and annotations unless `with_spec`.
v1::Job ToProto(const JobGlimpse& job, bool with_spec);
v1::JobEvent ToProto(const JobEventRecord& event, const std::string& job_name);
v1::StepRecord ToProto(const StepRecord& record);
v1::LogLine ToProto(const LogLine& line);
v1::Operation ToProto(const OperationRecord& operation);
v1::Checkpoint ToProto(const SaveRecord& save);
v1::Node ToProto(const NodeView& view);

}  // namespace ravel::coordinator
