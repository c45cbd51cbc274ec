#include "tests/testing/tiny_job.h"

#include <algorithm>
#include <cstdint>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "tests/testing/process.h"

namespace ravel::testing {
namespace {

std::string ModelYaml(const TinyJob& job) {
  if (!job.model_from.empty()) {
    return absl::StrCat("  model: {from: \"", job.model_from, "\"}\n");
  }
  return absl::StrCat("  model:\n    config:\n",
                      "      modelType: llama\n",
                      "      vocabSize: ",
                      job.vocabulary,
                      "\n",
                      "      hiddenSize: ",
                      job.hidden,
                      "\n",
                      "      intermediateSize: ",
                      job.intermediate,
                      "\n",
                      "      numHiddenLayers: ",
                      job.layers,
                      "\n",
                      "      numAttentionHeads: ",
                      job.heads,
                      "\n",
                      "      numKeyValueHeads: ",
                      job.key_value_heads,
                      "\n",
                      "      maxPositionEmbeddings: ",
                      job.sequence_length,
                      "\n",
                      "      tieWordEmbeddings: ",
                      job.tied ? "true" : "false",
                      "\n");
}

std::string CheckpointYaml(const TinyJob& job) {
  const bool url = job.store.find("://") != std::string::npos;
  std::string text = absl::StrCat("  checkpoint:\n    store: \"",
                                  url ? "" : "file://",
                                  job.store,
                                  "\"\n",
                                  "    everySteps: ",
                                  job.save_every_steps,
                                  "\n",
                                  "    whenBusy: ",
                                  job.when_busy,
                                  "\n",
                                  "    keep: {last: ",
                                  job.keep_last,
                                  "}\n");
  if (!job.resume_from.empty()) {
    absl::StrAppend(&text, "    resumeFrom: \"", job.resume_from, "\"\n");
  }
  if (job.allow_numerics_change) {
    absl::StrAppend(&text, "    allowNumericsChange: true\n");
  }
  return text;
}

}  // namespace

std::string ToYaml(const TinyJob& job) {
  std::string text = absl::StrCat("apiVersion: ravel/v1\nkind: TrainingJob\nmetadata: {name: ",
                                  job.name,
                                  "}\nspec:\n",
                                  ModelYaml(job));
  absl::StrAppend(&text,
                  "  data:\n    train: [{path: \"",
                  job.tokens_path,
                  "\"}]\n",
                  "    format: flat_u16\n    sequenceLength: ",
                  job.sequence_length,
                  "\n");
  absl::StrAppend(&text,
                  "  training:\n    steps: ",
                  job.steps,
                  "\n    globalBatch: ",
                  job.global_batch,
                  job.micro_batch > 0 ? absl::StrCat("\n    microBatch: ", job.micro_batch) : "",
                  "\n    seed: ",
                  job.seed,
                  "\n    optimizer: {lr: 3e-3, weightDecay: 0.1",
                  job.optimizer.empty() ? "" : ", ",
                  job.optimizer,
                  "}\n    schedule: {kind: cosine, warmupSteps: ",
                  std::min<int64_t>(3, job.steps - 1),
                  "}\n");
  absl::StrAppend(&text, "  devices: {kind: cpu, count: ", job.workers, "}\n");
  if (!job.sizes.empty()) {
    absl::StrAppend(&text,
                    "  elastic: {sizes: [",
                    absl::StrJoin(job.sizes, ", "),
                    "], growDelay: 0s, growEvery: 0s}\n");
  }
  if (!job.transport.empty() || !job.parallelism.empty()) {
    absl::StrAppend(&text,
                    "  parallelism: {transport: ",
                    job.transport.empty() ? "auto" : job.transport,
                    job.parallelism.empty() ? "" : ", ",
                    job.parallelism,
                    "}\n");
  }
  absl::StrAppend(
      &text,
      "  determinism: {mode: exact, virtualRanks: ",
      job.virtual_ranks,
      job.tensor_parts > 0 ? absl::StrCat(", tensorParts: ", job.tensor_parts) : "",
      "}\n",
      CheckpointYaml(job),
      "  restart: {backoff: 100ms, maxBackoff: 200ms, maxNoProgress: 20, maxFailures: ",
      job.max_failures,
      job.max_failures > 50 ? absl::StrCat(", maxPerDay: ", job.max_failures) : "",
      "}\n",
      job.detection.empty() ? "" : absl::StrCat("  detection: {time: ", job.detection, "}\n"),
      job.more_spec);
  return text;
}

void WriteTokens(const std::string& path, int64_t count, int64_t vocabulary) {
  std::string bytes;
  bytes.reserve(static_cast<size_t>(count) * 2);
  uint64_t random = 88172645463325252u;
  uint64_t id = 0;
  const uint64_t ids = static_cast<uint64_t>(vocabulary);
  for (int64_t i = 0; i < count; ++i) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    // Three times of four the next id follows from the last one.
    id = (random & 3) != 0 ? (id * 5 + 3) % ids : (random >> 8) % ids;
    bytes.push_back(static_cast<char>(id & 0xff));
    bytes.push_back(static_cast<char>(id >> 8));
  }
  WriteText(path, bytes);
}

}  // namespace ravel::testing
