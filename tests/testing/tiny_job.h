#pragma once

// Job files and token files small enough that a training step takes milliseconds.

#include <cstdint>
#include <string>
#include <vector>

namespace ravel::testing {

// What a test wants of a job; ToYaml makes the job file.
struct TinyJob {
  std::string name = "tiny";
  std::string tokens_path;  // flat_u16 file
  std::string store;        // folder for checkpoints, or a URL
  int64_t workers = 2;
  std::vector<int64_t> sizes = {};  // elastic.sizes; empty = fixed size
  int64_t steps = 10;
  int64_t global_batch = 8;
  int64_t micro_batch = 0;  // 0: one micro-batch per lane
  int64_t virtual_ranks = 8;
  int64_t tensor_parts = 0;  // 0: the default
  int64_t sequence_length = 16;
  int64_t save_every_steps = 5;
  int64_t keep_last = 1000;
  // Steps take milliseconds: a save would find the one before unfinished, and be skipped.
  std::string when_busy = "wait";
  std::string transport = {};    // empty = auto
  std::string parallelism = {};  // more of spec.parallelism: "strategy: hsdp, replicas: 2"
  std::string resume_from = {};
  bool allow_numerics_change = false;
  std::string model_from = {};  // instead of the inline configuration
  uint64_t seed = 7;
  std::string optimizer = {};  // more of spec.training.optimizer: "stateDtype: bf16"
  // Odd on purpose: no size is a power of two or a multiple of a vector.
  int64_t vocabulary = 97;
  int64_t hidden = 36;
  int64_t intermediate = 52;
  int64_t layers = 3;
  int64_t heads = 6;
  int64_t key_value_heads = 2;
  bool tied = false;
  int64_t max_failures = 10;
  // Lines added to the end of `spec`, indented by two spaces.
  std::string more_spec = {};
  std::string detection = {};  // empty: the coordinator's
};

std::string ToYaml(const TinyJob& job);

// A flat uint16 file of `count` ids below `vocabulary`: a Markov chain, so that there is something
// to learn.
void WriteTokens(const std::string& path, int64_t count, int64_t vocabulary);

}  // namespace ravel::testing
