// Two ranks whose collectives differ in a single field are told so, whichever field it is, and
// whether or not the hosts met where they differed.

#include <latch>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/worker/comm/group_testing.h"
#include "worker/comm/collective_ledger.h"
#include "worker/comm/issue_log.h"

namespace ravel::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A collective that carries no payload, so that nothing but the hash can tell two of them apart.
struct EmptyCall {
  CollectiveKind kind = CollectiveKind::kExchange;
  CollectiveTag tag = {};
  int64_t elements = 0;
  int64_t element_bytes = kElementBytes;
  int contributors = 0;
};

absl::Status IssueEmptyCall(Communicator& group, const EmptyCall& call) {
  switch (call.kind) {
    case CollectiveKind::kBarrier:
      return group.Barrier(call.tag);
    case CollectiveKind::kAllGatherBytes:
      return group.AllGatherBytes(call.tag, {}, {});
    case CollectiveKind::kExchange:
      return group
          .ExchangePieces({.tag = call.tag,
                           .shard_elements = call.elements,
                           .contributors = call.contributors,
                           .element_bytes = call.element_bytes})
          .status();
    default:
      return absl::InvalidArgumentError(CollectiveKindName(call.kind));
  }
}

struct OneFieldCase {
  std::string transport;
  std::string field;
  EmptyCall calls[2];  // of ranks 0 and 1
};

std::string OneFieldName(const ::testing::TestParamInfo<OneFieldCase>& info) {
  return absl::StrCat(info.param.transport, "_", info.param.field);
}

std::vector<OneFieldCase> EveryFieldOnEveryTransport() {
  std::vector<OneFieldCase> cases;
  for (const char* transport : {"local", "shm", "gloo", "nccl"}) {
    const auto add = [&](const char* field, const EmptyCall& a, const EmptyCall& b) {
      cases.push_back({transport, field, {a, b}});
    };
    add("kind", {.kind = CollectiveKind::kBarrier}, {.kind = CollectiveKind::kAllGatherBytes});
    add("op",
        {.tag = {.op = plan::OpLabel::kGather}},
        {.tag = {.op = plan::OpLabel::kReduceScatter}});
    add("phase", {.tag = {.phase = plan::Phase::kFirst}}, {.tag = {.phase = plan::Phase::kLast}});
    add("element_bytes", {.element_bytes = 2}, {.element_bytes = 4});
    add("unit", {.tag = {.unit = 3}}, {.tag = {.unit = 7}});
    add("group", {.tag = {.group = 0}}, {.tag = {.group = 1}});
    add("call", {.tag = {.call = 1}}, {.tag = {.call = 2}});
    add("contributors", {.contributors = 1}, {.contributors = 2});
    add("elements", {.elements = 16}, {.elements = 24});
    // Beyond 32 bits.
    add("generation", {.tag = {.generation = 5}}, {.tag = {.generation = (int64_t{1} << 40) + 5}});
  }
  return cases;
}

// All that differ, but for the hash.
std::vector<std::string> DifferingFields(const IssueRecord& a, const IssueRecord& b) {
  std::vector<std::string> fields;
  const auto compare = [&](const char* field, auto of_a, auto of_b) {
    if (of_a != of_b) {
      fields.push_back(field);
    }
  };
  compare("sequence", a.sequence, b.sequence);
  compare("elements", a.elements, b.elements);
  compare("generation", a.generation, b.generation);
  compare("kind", a.kind, b.kind);
  compare("op", a.op, b.op);
  compare("phase", a.phase, b.phase);
  compare("element_bytes", a.element_bytes, b.element_bytes);
  compare("unit", a.unit, b.unit);
  compare("group", a.group, b.group);
  compare("call", a.call, b.call);
  compare("contributors", a.contributors, b.contributors);
  return fields;
}

void ExpectMismatch(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(kMismatchText));
}

class OneFieldTest : public ::testing::TestWithParam<OneFieldCase> {};

TEST_P(OneFieldTest, ThatDiffersIsAMismatchOnBothRanks) {
  const OneFieldCase& one_field = GetParam();
  IssueRecord records[2];
  std::latch told(2);
  RunRanks(one_field.transport, 2, [&](Communicator& group) {
    EXPECT_TRUE(group.Barrier({}).ok());
    absl::Status status = IssueEmptyCall(group, one_field.calls[group.rank()]);
    for (const IssueLog::Entry& entry : group.ledger().logs().front()->Last(1)) {
      records[group.rank()] = entry.record;
    }
    if (one_field.transport == "nccl" && status.ok()) {
      status = group.Barrier({});  // what a device has compared is looked at later
    }
    ExpectMismatch(status);
    // Who leaves closes its connections, which the other may see before it has compared.
    told.arrive_and_wait();
  });
  EXPECT_THAT(DifferingFields(records[0], records[1]), ElementsAre(one_field.field));
}

INSTANTIATE_TEST_SUITE_P(Fields,
                         OneFieldTest,
                         ::testing::ValuesIn(EveryFieldOnEveryTransport()),
                         OneFieldName);

// Transports on which a release is issued, but does not meet.
class UnmetReleaseTest : public ::testing::TestWithParam<std::string> {};

std::string TransportName(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

TEST_P(UnmetReleaseTest, ThatDiffersIsAMismatchInTheNextCollective) {
  std::latch told(2);
  RunRanks(GetParam(), 2, [&](Communicator& group) {
    EXPECT_TRUE(IssueEmptyCall(group, {}).ok());
    EXPECT_TRUE(group.ReleasePieces({.unit = group.rank()}).ok());
    ExpectMismatch(group.Barrier({}));
    told.arrive_and_wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         UnmetReleaseTest,
                         ::testing::Values("gloo", "nccl"),
                         TransportName);

uint64_t HashAfterUnits(const std::vector<int>& units) {
  IssueLog log({.name = "world", .members = {0, 1}}, std::make_shared<IssueLog::Context>());
  for (const int unit : units) {
    log.Issue(CollectiveKind::kBarrier, {.unit = unit}, {});
  }
  return log.state().hash;
}

TEST(IssueLogTest, HashCoversAllThatWasBeforeAndItsOrder) {
  const uint64_t hash = HashAfterUnits({1, 2, 3, 4});
  EXPECT_EQ(hash, HashAfterUnits({1, 2, 3, 4}));
  EXPECT_NE(hash, HashAfterUnits({9, 2, 3, 4}));
  EXPECT_NE(hash, HashAfterUnits({1, 9, 3, 4}));
  EXPECT_NE(hash, HashAfterUnits({2, 1, 3, 4}));
  EXPECT_NE(hash, HashAfterUnits({2, 3, 4}));
}

}  // namespace
}  // namespace ravel::comm
