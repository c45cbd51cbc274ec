#pragma once

// Codec of ShardingPlan and JobSpec: proto/plan.proto. The bytes are deterministic, so their digest
// names the plan.

#include <string>
#include <string_view>

#include "common/crypto.h"
#include "common/model/job_spec.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "proto/plan.pb.h"

namespace ravel::plan {

v1::PlannedJob ToProto(const JobSpec& spec);
// Errors name the field that has no such value.
absl::StatusOr<JobSpec> FromProto(const v1::PlannedJob& proto);

v1::ShardingPlan ToProto(const ShardingPlan& plan);
// Validates everything: the inventory of the model, layouts, buffers, and the programs with the
// checker.
absl::StatusOr<ShardingPlan> FromProto(const v1::ShardingPlan& proto);

// The same as bytes: equal values give equal bytes.
std::string SerializeJob(const JobSpec& spec);
absl::StatusOr<JobSpec> ParseJob(std::string_view bytes);
std::string SerializePlan(const ShardingPlan& plan);
absl::StatusOr<ShardingPlan> ParsePlan(std::string_view bytes);
// SHA-256 of the serialized plan: plans that differ in anything have different ones.
Sha256Digest PlanHash(const ShardingPlan& plan);

}  // namespace ravel::plan
