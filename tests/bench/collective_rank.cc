#include "tests/bench/collective_rank.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <random>
#include <sstream>

#include <absl/strings/str_cat.h>

namespace ravel::bench {
namespace {

constexpr int64_t kFloat = sizeof(float);

// What rank `rank` puts at `index`: exact in fp32 and different everywhere, so that a sum can be
// made another way.
float ValueOf(int rank, int64_t index) {
  const auto mixed =
      static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(rank);
  return static_cast<float>((mixed >> 20) % 4096) + static_cast<float>(rank) * 0.25f;
}

struct Shape {
  bool reduces = false;
  int64_t input = 0;   // elements of this rank
  int64_t output = 0;  // elements of this rank
};

Shape ShapeOf(const std::string& name, int64_t bytes, int ranks) {
  const int64_t all = bytes / kFloat;
  if (name == "barrier" || name == "ping") {
    return {};
  }
  if (name == "copy") {
    return {false, all, all};
  }
  return name == "reduce_scatter" ? Shape{true, all, all / ranks} : Shape{false, all / ranks, all};
}

// "ok", or the first element of this rank's output that is not what the inputs of a slot lead to.
std::string Compare(const Shape& shape, const float* output, int64_t slot, int rank, int ranks) {
  for (int64_t i = 0; i < shape.output; ++i) {
    double expected = 0;
    if (shape.reduces) {
      for (int r = 0; r < ranks; ++r) {
        expected += ValueOf(r, rank * shape.output + i + slot);
      }
    } else {
      expected = ValueOf(static_cast<int>(i / shape.input), i % shape.input + slot);
    }
    if (output[i] != static_cast<float>(expected)) {
      return absl::StrCat("wrong: element ", i, " is ", output[i], ", expected ", expected);
    }
  }
  return "ok";
}

// A rank that finds a wrong element goes through the same collectives as those that do not.
std::string Verify(Collectives& ours, const std::string& name, int64_t bytes, int rank, int ranks) {
  const Shape shape = ShapeOf(name, bytes, ranks);
  std::string answer = "ok";
  ours.Prepare(name, bytes);
  for (int64_t slot = 0; slot < 2; ++slot) {
    float* input = ours.input(name, bytes, slot);
    for (int64_t i = 0; i < shape.input; ++i) {
      input[i] = ValueOf(rank, i + slot);
    }
    ours.Barrier();
    ours.Turn(name, bytes, slot);
    if (answer == "ok") {
      answer = Compare(shape, ours.output(name, bytes, slot), slot, rank, ranks);
    }
    ours.Barrier();
  }
  return answer;
}

void FillRandom(Collectives& ours, const std::string& name, int64_t bytes, int rank, int ranks) {
  const Shape shape = ShapeOf(name, bytes, ranks);
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  for (int64_t slot = 0; slot < SlotsOf(bytes); ++slot) {
    float* input = ours.input(name, bytes, slot);
    for (int64_t i = 0; i < shape.input; ++i) {
      input[i] = static_cast<float>(random()) * 0x1p-32f - 0.5f;
    }
  }
}

double Time(Collectives& ours, const std::string& name, int64_t bytes, int64_t turns) {
  const int64_t slots = SlotsOf(bytes);
  for (int64_t turn = 0; turn < 3; ++turn) {
    ours.Turn(name, bytes, turn % slots);
  }
  ours.Barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t turn = 0; turn < turns; ++turn) {
    ours.Turn(name, bytes, turn % slots);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<std::string> ExchangeRecords(const std::string& own) {
  std::cout << "record " << own << std::endl;
  std::string line;
  std::getline(std::cin, line);
  std::istringstream words(line);
  std::string word;
  words >> word;
  std::vector<std::string> records;
  while (words >> word) {
    records.push_back(word);
  }
  return records;
}

int ServeRank(Collectives& collectives, int rank, int ranks) {
  std::string line, prepared;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string what, name;
    int64_t bytes = 0, turns = 0;
    words >> what >> name >> bytes >> turns;
    const bool known = ((what == "verify" && name != "copy" && name != "ping") || what == "time") &&
                       bytes >= 0 && bytes <= kMostBytes && bytes % (kFloat * ranks) == 0 &&
                       collectives.Has(name);
    if (!known) {
      std::cout << "wrong: cannot " << line << std::endl;
    } else if (what == "verify") {
      std::cout << Verify(collectives, name, bytes, rank, ranks) << std::endl;
    } else {
      collectives.Prepare(name, bytes);
      if (name != "barrier" && prepared != absl::StrCat(name, bytes)) {
        FillRandom(collectives, name, bytes, rank, ranks);
        prepared = absl::StrCat(name, bytes);
      }
      std::printf("%.9f\n", Time(collectives, name, bytes, turns));
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace ravel::bench
