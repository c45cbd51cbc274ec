#pragma once

// Messages of trainer_report.h. Both directions stand side by side, so that a field that one of
// them forgets is seen; trainer_report_proto_test compares the round trip.

#include <vector>

#include "common/trainer_report.h"
#include "proto/trainer.pb.h"

namespace ravel {

v1::TrainerReady ToProto(const TrainerReady& ready);
TrainerReady FromProto(const v1::TrainerReady& message);

v1::StepReport ToProto(const StepReport& report);
StepReport FromProto(const v1::StepReport& message);

v1::SaveFailed ToProto(const SaveFailed& failure);
// Trainers that do not say which attempt it was have one.
SaveFailed FromProto(const v1::SaveFailed& message);

v1::LedgerReport ToProto(const LedgerReport& report);
LedgerReport FromProto(const v1::LedgerReport& message);

void AddCollectives(const std::vector<CollectiveState>& states, v1::TrainerProgress& message);
std::vector<CollectiveState> CollectivesOf(const v1::TrainerProgress& message);

}  // namespace ravel
