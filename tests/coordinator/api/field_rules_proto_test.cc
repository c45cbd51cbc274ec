#include "coordinator/api/field_rules_proto.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/jobs.pb.h"

namespace ravel {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> Apply(v1::JobSpec& spec) {
  std::vector<std::string> told;
  ApplyFieldRules(spec, "spec", [&](std::string path, std::string expected, std::string got) {
    told.push_back(absl::StrCat(path, ": expected ", expected, ", got ", got));
  });
  return told;
}

v1::JobSpec Least() {
  v1::JobSpec spec;
  spec.mutable_training()->set_global_batch(8);
  spec.mutable_training()->mutable_optimizer()->set_lr(1e-3);
  spec.mutable_devices()->set_count(2);
  return spec;
}

void Walk(const Descriptor& type, std::function<void(const FieldDescriptor&)> visit) {
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    visit(field);
    if (field.message_type() != nullptr && !field.is_map()) {
      Walk(*field.message_type(), visit);
    }
  }
}

TEST(FieldRulesTest, EveryDefaultObeysItsOwnRules) {
  v1::JobSpec spec = Least();
  EXPECT_THAT(Apply(spec), IsEmpty());
  int presets = 0;
  Walk(*v1::JobSpec::descriptor(), [&](const FieldDescriptor& field) {
    const v1::FieldRules rules = RulesOf(field);
    presets += rules.preset().empty() ? 0 : 1;
    const std::set<std::string> choices(rules.choices().begin(), rules.choices().end());
    EXPECT_EQ(choices.size(), static_cast<size_t>(rules.choices_size())) << field.full_name();
    EXPECT_TRUE(rules.preset().empty() || choices.empty() || choices.contains(rules.preset()))
        << field.full_name();
  });
  EXPECT_GT(presets, 20);
}

TEST(FieldRulesTest, FillsInDefaultsOnce) {
  v1::JobSpec spec = Least();
  EXPECT_THAT(Apply(spec), IsEmpty());
  EXPECT_EQ(spec.training().schedule().kind(), "cosine");
  EXPECT_EQ(spec.detection().time(), "5s");
  EXPECT_EQ(spec.checkpoint().keep().last(), 3);
  EXPECT_EQ(spec.restart().max_failures(), -1);
  EXPECT_THAT(spec.training().optimizer().betas(), ElementsAre(0.9, 0.95));
  EXPECT_DOUBLE_EQ(spec.training().optimizer().eps(), 1e-8);
  EXPECT_FALSE(spec.observability().has_trace());
  EXPECT_FALSE(spec.model().has_config());
  const std::string once = spec.SerializeAsString();
  EXPECT_THAT(Apply(spec), IsEmpty());
  EXPECT_EQ(spec.SerializeAsString(), once);
}

TEST(FieldRulesTest, WhatIsGivenStays) {
  v1::JobSpec spec = Least();
  spec.mutable_detection()->set_time("1500ms");
  spec.mutable_training()->mutable_optimizer()->set_clip_norm(0);
  spec.mutable_training()->mutable_evaluation()->set_batches(3);
  EXPECT_THAT(Apply(spec), IsEmpty());
  EXPECT_EQ(spec.detection().time(), "1s500ms");  // canonical
  EXPECT_EQ(spec.training().optimizer().clip_norm(), 0);
  EXPECT_EQ(spec.training().evaluation().batches(), 3);
}

TEST(FieldRulesTest, ValuesOutsideAreToldWithTheirPath) {
  v1::JobSpec spec = Least();
  spec.mutable_data()->add_train()->set_weight(-2);
  spec.mutable_training()->set_global_batch(0);
  spec.mutable_training()->mutable_optimizer()->add_betas(1.5);
  spec.mutable_training()->mutable_schedule()->set_kind("cosinus");
  spec.mutable_training()->mutable_schedule()->set_min_ratio(2);
  spec.mutable_parallelism()->set_communication_blocks(65);
  spec.mutable_devices()->clear_count();
  spec.mutable_detection()->set_time("2m");
  spec.mutable_parallelism()->set_gather_window("much");
  EXPECT_THAT(
      Apply(spec),
      ElementsAre(
          "spec.data.train[0].weight: expected a number above 0, got -2",
          "spec.training.globalBatch: expected a whole number >= 1, got nothing",
          "spec.training.optimizer.betas: expected 2 numbers from 0 to below 1, got [1.5]",
          "spec.training.schedule.kind: expected one of cosine, constant, linear, wsd (did you "
          "mean 'cosine'?), got 'cosinus'",
          "spec.training.schedule.minRatio: expected a number from 0 to 1, got 2",
          "spec.parallelism.gatherWindow: expected a size such as 512MiB or 1GiB, got 'much'",
          "spec.parallelism.communicationBlocks: expected a whole number from 0 to 64, got 65",
          "spec.devices.count: expected a whole number from 1 to 65536, got nothing",
          "spec.detection.time: expected a duration such as 90s, 20m or 14d, from 500ms to 1m, got "
          "'2m'"));
}

TEST(FieldRulesTest, AreToldInWords) {
  const auto describe = [](const Descriptor& type, const char* name) {
    return DescribeRules(*type.FindFieldByName(name));
  };
  EXPECT_EQ(describe(*v1::DetectionSpec::descriptor(), "time"),
            "default 5s; a duration such as 90s, 20m or 14d, from 500ms to 1m");
  EXPECT_EQ(describe(*v1::TrainingSpec::descriptor(), "global_batch"), "a whole number >= 1");
  EXPECT_EQ(describe(*v1::ScheduleSpec::descriptor(), "kind"),
            "default cosine; one of cosine, constant, linear, wsd");
  EXPECT_EQ(describe(*v1::DataSpec::descriptor(), "train"), "");
}

}  // namespace
}  // namespace ravel
