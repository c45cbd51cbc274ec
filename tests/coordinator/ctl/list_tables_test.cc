#include "coordinator/ctl/list_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::ctl {
namespace {

using ::testing::HasSubstr;

std::vector<JobView> Jobs() {
  JobView running;
  running.namespace_name = "team";
  running.name = "demo";
  running.state = "RUNNING";
  running.step = 20;
  running.total_steps = 100;
  running.loss = 2.5;
  running.tokens_per_second = 7900;
  running.world_size = 2;
  running.epoch = 3;
  running.attempt = 2;
  running.restarts = 1;
  running.eta_seconds = 90;
  running.document = *json::Parse(R"({"spec": {"checkpoint": {"store": "s3://bucket/web"}}})");
  JobView failed;
  failed.name = "other";
  failed.state = "FAILED";
  failed.reason = "DataError";
  failed.message = "rank 0\nno such file";
  return {running, failed};
}

TEST(ListTables, Jobs) {
  EXPECT_EQ(JobTable(Jobs(), false, Columns::kUsual).Text(true),
            "NAME   STATE    STEP    LOSS  TOK/S  WORKERS  EPOCH  CHECKPOINT  AGE\n"
            "demo   RUNNING  20/100  2.5   7.9k   2        3      -           -\n"
            "other  FAILED   0/0     -     -      0        0      -           -\n");
  EXPECT_EQ(JobTable(Jobs(), false, Columns::kWide).Text(true),
            "NAME   STATE    STEP    LOSS  TOK/S  WORKERS  EPOCH  CHECKPOINT  AGE  ATTEMPT  "
            "RESTARTS  ETA    STORE            REASON\n"
            "demo   RUNNING  20/100  2.5   7.9k   2        3      -           -    2        "
            "1         1m30s  s3://bucket/web  -\n"
            "other  FAILED   0/0     -     -      0        0      -           -    0        "
            "0         -      -                DataError: rank 0\\nno such file\n");
  EXPECT_THAT(JobTable(Jobs(), true, Columns::kWide).Text(true), HasSubstr("NAMESPACE  NAME"));
}

TEST(ListTables, Nodes) {
  NodeView node;
  node.id = "n1";
  node.state = "READY";
  node.devices = 2;
  node.device_kind = "cpu";
  node.address = "10.0.0.1";
  node.version = "0.1.0";
  node.networks = {"fast", "storage"};
  node.message = "no GPU";
  NodeView older;  // of a coordinator that tells no networks
  older.id = "n2";
  older.state = "LOST";
  EXPECT_EQ(NodeTable({node, older}, Columns::kUsual).Text(true),
            "NODE  STATE  DEVICES  FREE  KIND  ADDRESS   BEAT  FAILED  NOTE\n"
            "n1    READY  2        0     cpu   10.0.0.1  -     0       no GPU\n"
            "n2    LOST   0        0                     -     0\n");
  EXPECT_EQ(
      NodeTable({node, older}, Columns::kWide).Text(true),
      "NODE  STATE  DEVICES  FREE  KIND  ADDRESS   BEAT  FAILED  NETWORKS      VERSION  NOTE\n"
      "n1    READY  2        0     cpu   10.0.0.1  -     0       fast,storage  0.1.0    no GPU\n"
      "n2    LOST   0        0                     -     0       -             -\n");
}

TEST(ListTables, Steps) {
  CheckpointView step;
  step.step = 20;
  step.path = "/store/step-20";
  step.state = "COMMITTED";
  step.pinned = true;
  step.files = 2;
  step.epoch = 3;
  step.mesh = "shard 8";
  step.world_size = 8;
  step.save_id = "e3-a1-s2";
  const std::string usual = StepTable({step}, Columns::kUsual).Text(true);
  EXPECT_THAT(usual, HasSubstr("MESH     EPOCH  AGE"));
  EXPECT_THAT(usual, HasSubstr("20    COMMITTED pinned"));
  EXPECT_THAT(usual, ::testing::Not(HasSubstr("SAVE")));
  const std::string wide = StepTable({step}, Columns::kWide).Text(true);
  EXPECT_THAT(wide, HasSubstr("  RANKS  SAVE      PATH\n"));
  EXPECT_THAT(wide, HasSubstr("  8      e3-a1-s2  /store/step-20\n"));
}

}  // namespace
}  // namespace ravel::ctl
