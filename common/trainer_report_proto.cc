// Converts the messages that trainers report, both directions side by side. All of a message's
// fields are named in each function and a round-trip test compares them, so a new field cannot be
// forgotten in one direction.

#include "common/trainer_report_proto.h"

#include <utility>

namespace ravel {
namespace {

v1::LedgerEntry ToProto(const LedgerEntry& entry) {
  v1::LedgerEntry message;
  message.set_sequence(entry.sequence);
  message.set_hash(entry.hash);
  message.set_order(entry.order);
  message.set_kind(entry.kind);
  message.set_op(entry.op);
  message.set_unit(entry.unit);
  message.set_group(entry.group);
  message.set_call(entry.call);
  message.set_phase(entry.phase);
  message.set_generation(entry.generation);
  message.set_elements(entry.elements);
  message.set_element_bytes(entry.element_bytes);
  message.set_age_ms(entry.age_ms);
  return message;
}

LedgerEntry FromProto(const v1::LedgerEntry& message) {
  return {.sequence = message.sequence(),
          .hash = message.hash(),
          .order = message.order(),
          .kind = message.kind(),
          .op = message.op(),
          .unit = message.unit(),
          .call = message.call(),
          .phase = message.phase(),
          .generation = message.generation(),
          .elements = message.elements(),
          .element_bytes = message.element_bytes(),
          .age_ms = message.age_ms(),
          .group = message.group()};
}

}  // namespace

v1::TrainerReady ToProto(const TrainerReady& ready) {
  v1::TrainerReady message;
  message.set_step(ready.step);
  message.set_planned_bytes(ready.planned_bytes);
  message.set_measured_bytes(ready.measured_bytes);
  message.set_restore_seconds(ready.restore_seconds);
  for (const StartRemark& remark : ready.remarks) {
    v1::StartRemark& added = *message.add_remarks();
    added.set_reason(remark.reason);
    added.set_message(remark.message);
  }
  return message;
}

TrainerReady FromProto(const v1::TrainerReady& message) {
  TrainerReady ready = {.step = message.step(),
                        .planned_bytes = message.planned_bytes(),
                        .measured_bytes = message.measured_bytes(),
                        .restore_seconds = message.restore_seconds()};
  for (const v1::StartRemark& remark : message.remarks()) {
    ready.remarks.push_back({remark.reason(), remark.message()});
  }
  return ready;
}

v1::StepReport ToProto(const StepReport& report) {
  v1::StepReport message;
  message.set_step(report.step);
  message.set_loss(report.loss);
  message.set_grad_norm(report.grad_norm);
  message.set_lr(report.lr);
  message.set_tokens(report.tokens);
  message.set_step_seconds(report.step_seconds);
  message.set_skipped(report.skipped);
  message.set_loss_scale(report.loss_scale);
  message.set_has_validation_loss(report.has_validation_loss);
  message.set_validation_loss(report.validation_loss);
  message.set_time_ms(report.time_ms);
  message.set_planned_bytes(report.planned_bytes);
  message.set_measured_bytes(report.measured_bytes);
  return message;
}

StepReport FromProto(const v1::StepReport& message) {
  return {.step = message.step(),
          .loss = message.loss(),
          .grad_norm = message.grad_norm(),
          .lr = message.lr(),
          .tokens = message.tokens(),
          .step_seconds = message.step_seconds(),
          .skipped = message.skipped(),
          .loss_scale = message.loss_scale(),
          .has_validation_loss = message.has_validation_loss(),
          .validation_loss = message.validation_loss(),
          .time_ms = message.time_ms(),
          .planned_bytes = message.planned_bytes(),
          .measured_bytes = message.measured_bytes()};
}

v1::SaveFailed ToProto(const SaveFailed& failure) {
  v1::SaveFailed message;
  message.set_step(failure.step);
  message.set_sequence(failure.sequence);
  message.set_save_attempt(failure.attempt);
  message.set_reason(failure.reason);
  message.set_message(failure.message);
  message.set_skipped(failure.skipped);
  return message;
}

SaveFailed FromProto(const v1::SaveFailed& message) {
  return {.step = message.step(),
          .sequence = message.sequence(),
          .attempt = message.save_attempt() == 0 ? 1 : message.save_attempt(),
          .reason = message.reason(),
          .message = message.message(),
          .skipped = message.skipped()};
}

v1::LedgerReport ToProto(const LedgerReport& report) {
  v1::LedgerReport message;
  message.set_epoch(report.epoch);
  for (const LedgerOfGroup& of_group : report.groups) {
    v1::LedgerOfGroup& group = *message.add_groups();
    group.set_group(of_group.group);
    group.mutable_members()->Add(of_group.members.begin(), of_group.members.end());
    group.set_completed(of_group.completed);
    for (const LedgerEntry& entry : of_group.entries) {
      *group.add_entries() = ToProto(entry);
    }
  }
  return message;
}

LedgerReport FromProto(const v1::LedgerReport& message) {
  LedgerReport report = {.groups = {}, .epoch = message.epoch()};
  for (const v1::LedgerOfGroup& of_group : message.groups()) {
    LedgerOfGroup group = {.group = of_group.group(),
                           .members = {of_group.members().begin(), of_group.members().end()},
                           .completed = of_group.completed(),
                           .entries = {}};
    for (const v1::LedgerEntry& entry : of_group.entries()) {
      group.entries.push_back(FromProto(entry));
    }
    report.groups.push_back(std::move(group));
  }
  return report;
}

void AddCollectives(const std::vector<CollectiveState>& states, v1::TrainerProgress& message) {
  for (const CollectiveState& state : states) {
    v1::CollectiveState& group = *message.add_collectives();
    group.set_group(state.group);
    group.set_first_member(state.first_member);
    group.set_sequence(state.sequence);
    group.set_hash(state.hash);
    group.set_completed(state.completed);
    group.set_waiting_ms(state.waiting_ms);
    group.set_mark_sequence(state.mark_sequence);
    group.set_mark_hash(state.mark_hash);
    group.set_waiting_in(state.waiting_in);
  }
}

std::vector<CollectiveState> CollectivesOf(const v1::TrainerProgress& message) {
  std::vector<CollectiveState> states;
  for (const v1::CollectiveState& group : message.collectives()) {
    states.push_back({.group = group.group(),
                      .first_member = group.first_member(),
                      .sequence = group.sequence(),
                      .hash = group.hash(),
                      .completed = group.completed(),
                      .waiting_ms = group.waiting_ms(),
                      .mark_sequence = group.mark_sequence(),
                      .mark_hash = group.mark_hash(),
                      .waiting_in = group.waiting_in()});
  }
  return states;
}

}  // namespace ravel
