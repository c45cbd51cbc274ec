// Input of a trainer: frames of its daemon as commands, requests for generated text, and the index
// of a model's files.

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/ckpt/safetensors.h"
#include "common/plan/plan_proto.h"
#include "coordinator/api/job_file_proto.h"
#include "proto/trainer.pb.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/fuzz_proto.h"
#include "tests/testing/process.h"
#include "tests/testing/saved_state.h"
#include "tests/testing/tiny_job.h"
#include "worker/checkpoint/loader.h"
#include "worker/trainer/daemon_link_proto.h"
#include "worker/trainer/generator.h"
#include "worker/trainer/job_paths.h"

namespace ravel::testing {
namespace {

v1::TrainerDown StartFrame() {
  const TinyJob job = {.tokens_path = "/usr/no-such-data", .store = "/tmp", .layers = 1};
  const plan::JobSpec spec =
      *plan::ResolveBatch(Canonicalize(ParseJobFile(ToYaml(job)).job, {}).spec);
  v1::TrainerDown frame;
  v1::StartTrainer& start = *frame.mutable_start();
  start.set_job_uid("uid");
  start.set_epoch(1);
  start.set_world_size(2);
  start.set_job(plan::SerializeJob(spec));
  start.set_plan(plan::SerializePlan(*plan::BuildShardingPlan({.spec = spec, .ranks = 2})));
  start.set_checkpoint_root("/tmp/no-such-store/tiny");
  return frame;
}

std::vector<std::string> CommandFrames() {
  std::vector<v1::TrainerDown> frames(8);
  frames[0] = StartFrame();
  frames[1].mutable_comm_records()->add_records("record");
  frames[2].mutable_run()->set_until_step(20);
  frames[3].mutable_save()->set_sequence(1);
  frames[4].mutable_stop()->set_reason("cancelled");
  frames[5].mutable_commit()->set_step(10);
  frames[6].mutable_peer_lost()->set_reason("lost");
  frames[7].mutable_ask_ledger()->set_most(8);
  std::vector<std::string> bytes;
  for (const v1::TrainerDown& frame : frames) {
    bytes.push_back(frame.SerializeAsString());
  }
  return bytes;
}

// The command that a trainer makes of one frame's bytes; nothing if the socket has no room for it.
std::optional<absl::StatusOr<trainer::Command>> CommandOf(std::string_view frame) {
  std::array<int, 2> fds = {};
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) != 0) {
    return std::nullopt;
  }
  const int room = 8 << 20;
  setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
  const auto size = static_cast<uint32_t>(frame.size());
  const std::string bytes = absl::StrCat(
      std::string(reinterpret_cast<const char*>(&size), sizeof(size)), std::string(frame));
  const bool fed = send(fds[1], bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
                   static_cast<ssize_t>(bytes.size());
  close(fds[1]);
  auto link = TrainerLink::Open(fds[0]);
  if (!fed || !link.ok()) {
    return std::nullopt;
  }
  return trainer::DaemonLinkReporter(*std::move(link)).Receive();
}

// Roots that are there on every machine.
constexpr char kReadRoot[] = "/usr";
constexpr char kWriteRoot[] = "/tmp";

// The first path of an assignment that its roots should not have let pass; "" for none.
std::string PathOutside(const trainer::Assignment& assignment) {
  const plan::JobSpec& spec = assignment.spec;
  std::vector<RootedPath> paths = {{"", assignment.checkpoint_root, PathUse::kWrite},
                                   {"", spec.trace_directory, PathUse::kWrite},
                                   {"", spec.optimizer.offload.path, PathUse::kWrite},
                                   {"", assignment.restore_path},
                                   {"", spec.model_from},
                                   {"", spec.data.tokenizer}};
  for (const auto* sources : {&spec.data.train, &spec.data.validation}) {
    for (const plan::DataSource& source : *sources) {
      paths.push_back({"", source.path});
    }
  }
  for (const RootedPath& path : paths) {
    const absl::StatusOr<std::string> plain = PlainPath(path.path);
    const bool inside =
        plain.ok() && (IsBeneath(kWriteRoot, *plain) ||
                       (path.use == PathUse::kRead && IsBeneath(kReadRoot, *plain)));
    if (!path.path.empty() && !IsServiceUrl(path.path) && !inside) {
      return path.path;
    }
  }
  return "";
}

TEST(FuzzTrainer, CommandsOfADaemon) {
  const std::vector<std::string> seeds = CommandFrames();
  const v1::TrainerDown prototype;
  int64_t allowed = 0;
  const FuzzCounts counts = Fuzz(
      {.name = "trainer_command",
       .seeds = seeds,
       .mutate = MessageMutation(
           prototype, seeds, {"/usr/a", "/tmp/b", "/etc/passwd", "/usr/../etc", "s3://b"}),
       .heap_bytes = int64_t{256} << 20,
       .cpu_time = std::chrono::milliseconds(3000)},
      [&allowed](std::string_view input) {
        const auto command = CommandOf(input);
        if (!command || !command->ok()) {
          return Refused();
        }
        const auto* assignment = std::get_if<trainer::Assignment>(&**command);
        if (assignment == nullptr) {
          return Accepted();
        }
        if (assignment->rank < 0 || assignment->rank >= assignment->plan.ranks ||
            !assignment->spec.model.has_value()) {
          return AcceptedIf(false, "is an assignment of no rank, or of no model");
        }
        const bool passed =
            trainer::CheckJobPaths(*assignment, {.read = {kReadRoot}, .write = {kWriteRoot}}).ok();
        allowed += passed ? 1 : 0;
        const std::string outside = passed ? PathOutside(*assignment) : "";
        return AcceptedIf(outside.empty(), "opens " + outside);
      });
  if (counts.runs > 100) {  // more than one input that was asked for by its number
    EXPECT_GT(allowed, 0) << "no job passed its roots";
  }
}

TEST(FuzzTrainer, GeneratorRequests) {
  Fuzz({.name = "generator_request",
        .form = FuzzForm::kText,
        .seeds = {R"({"tokens":[1,2],"maxNewTokens":100,"temperature":0.8,"topK":40,"seed":1,)"
                  R"("stopToken":2})",
                  R"({"tokens":[0]})"}},
       [](std::string_view input) {
         const absl::StatusOr<trainer::GenerateRequest> request =
             trainer::ParseGenerateRequest(input);
         if (!request.ok()) {
           return Refused();
         }
         bool good = !request->tokens.empty() && request->max_new_tokens >= 0 &&
                     request->temperature >= 0 && request->top_k >= 0 && request->stop_token >= -1;
         for (const int32_t token : request->tokens) {
           good = good && token >= 0;
         }
         if (!good) {
           return AcceptedIf(false, "asks for what there is not");
         }
         const std::vector<float> logits = {0.5f, -1.0f, 2.0f};
         const int32_t token = trainer::SampleToken({.logits = logits,
                                                     .temperature = request->temperature,
                                                     .top_k = request->top_k,
                                                     .uniform = 0.5});
         return AcceptedIf(token >= 0 && token < 3, "draws a token that is none");
       });
}

// Two files with three tensors, and an index that changes.
class ShardedModel {
 public:
  ShardedModel() : inventory_(InventoryOf({{3, 4}, {5}, {2, 2}})) {
    WriteTensors("a.safetensors", {0});
    WriteTensors("b.safetensors", {1, 2});
  }
  std::string Index() const {
    const auto name = [this](size_t i) { return inventory_.tensors[i].name; };
    return absl::StrCat(R"({"metadata":{"total_size":1},"weight_map":{")",
                        name(0),
                        R"(":"a.safetensors",")",
                        name(1),
                        R"(":"b.safetensors",")",
                        name(2),
                        R"(":"b.safetensors"}})");
  }
  FuzzAnswer Open(std::string_view index) const {
    WriteText(folder_.path() + "/model.safetensors.index.json", std::string(index));
    auto loader = checkpoint::HuggingFaceLoader::Open(folder_.path(), &inventory_);
    if (!loader.ok()) {
      return Refused();
    }
    std::vector<float> shard(12, -1.0f);
    const Box whole = WholeBox(inventory_.tensors[0].shape);
    const std::vector<plan::OwnedPiece> pieces = {
        {.tensor = 0, .item = whole, .range = {0, 12}, .shard_offset = 0}};
    return AcceptedIf(loader->ReadPieces(pieces, shard).ok(), "opens, and cannot be read");
  }

 private:
  void WriteTensors(const std::string& file, const std::vector<size_t>& tensors) const {
    std::vector<ckpt::SafetensorsEntry> entries;
    std::string data;
    for (const size_t i : tensors) {
      const Shape& shape = inventory_.tensors[i].shape;
      entries.push_back({.key = inventory_.tensors[i].name,
                         .dtype = DType::kF32,
                         .shape = shape,
                         .saved_offset = {}});
      data += std::string(static_cast<size_t>(ElementCount(shape)) * sizeof(float), '\0');
    }
    ckpt::PlaceSafetensorsEntries(entries);
    WriteText(folder_.path() + "/" + file, ckpt::SafetensorsExportHeader(entries) + data);
  }

  const plan::ModelInventory inventory_;
  const ScratchFolder folder_;
};

TEST(FuzzTrainer, IndicesOfModelFiles) {
  const ShardedModel model;
  Fuzz({.name = "shard_index", .form = FuzzForm::kText, .seeds = {model.Index()}},
       [&model](std::string_view input) { return model.Open(input); });
}

}  // namespace
}  // namespace ravel::testing
