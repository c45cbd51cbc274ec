#include "tests/worker/comm/group_testing.h"

#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/worker/comm/nccl_testing.h"
#include "worker/comm/communicator_factory.h"
#include "worker/comm/local_communicator.h"
#include "worker/comm/mixed_communicator.h"

namespace ravel::comm {
namespace {

constexpr int64_t kMaxElements = 100000;  // beyond one bounce buffer
constexpr int64_t kFloatBytes = sizeof(float);

struct ScriptState {
  Communicator& group;
  const std::vector<int>& members;
  int round = 0;
  int64_t elements = 0;
  float* common = nullptr;
  float* symmetric = nullptr;
};

int OwnRank(const ScriptState& state) {
  return state.members[static_cast<size_t>(state.group.rank())];
}

std::string Fault(const ScriptState& state, std::string_view what, const absl::Status& status) {
  return absl::StrCat("round ",
                      state.round,
                      ", ",
                      state.elements,
                      " elements, ",
                      std::string(what),
                      ": ",
                      status.ToString());
}

std::string CheckGathered(const ScriptState& state, const float* gathered) {
  for (int r = 0; r < state.group.size(); ++r) {
    for (int64_t i = 0; i < state.elements; ++i) {
      if (gathered[r * state.elements + i] !=
          ValueOf(state.round, state.members[static_cast<size_t>(r)], i)) {
        return absl::StrCat("round ",
                            state.round,
                            ": gathered value ",
                            i,
                            " of rank ",
                            r,
                            " is ",
                            gathered[r * state.elements + i]);
      }
    }
  }
  return "";
}

void Fill(const ScriptState& state, float* shard) {
  for (int64_t i = 0; i < state.elements; ++i) {
    shard[i] = ValueOf(state.round, OwnRank(state), i);
  }
}

// `where` 0: in place in common memory (where there is such), 1: shard in symmetric memory, 2:
// neither in the arena.
std::string Gather(const ScriptState& state, int where) {
  std::vector<float> own(static_cast<size_t>(state.elements));
  std::vector<float> gathered(static_cast<size_t>(state.elements * state.group.size()));
  float* shard = where == 2 ? own.data() : state.symmetric;
  float* target = gathered.data();
  if (where == 0 && state.common != nullptr) {
    target = state.common;
    shard = state.common + state.group.rank() * state.elements;
  }
  Fill(state, shard);
  absl::Status done = state.group.AllGather({.tag = {plan::OpLabel::kGather, where, 0},
                                             .shard = shard,
                                             .gathered = target,
                                             .shard_elements = state.elements});
  if (!done.ok()) {
    return Fault(state, "all_gather", done);
  }
  std::string wrong = CheckGathered(state, target);
  // Nobody writes its slice of common memory again while others read it.
  done = state.group.Barrier({});
  return done.ok() ? wrong : Fault(state, "barrier", done);
}

std::string Exchange(const ScriptState& state, int contributors) {
  Communicator& group = state.group;
  const int64_t all = state.elements * group.size();
  const bool staged = group.rank() < contributors;
  for (int64_t i = 0; staged && i < all; ++i) {
    state.symmetric[i] = ValueOf(state.round, OwnRank(state), i);
  }
  std::vector<float> receive(static_cast<size_t>(all));
  auto views = group.ExchangePieces({.tag = {plan::OpLabel::kReduceScatter, 1, 0},
                                     .staging = staged ? state.symmetric : nullptr,
                                     .receive = receive.data(),
                                     .shard_elements = state.elements,
                                     .contributors = contributors});
  if (!views.ok()) {
    return Fault(state, "exchange", views.status());
  }
  if (views->pieces.size() != static_cast<size_t>(contributors)) {
    return absl::StrCat("exchange: ", views->pieces.size(), " pieces, expected ", contributors);
  }
  std::string wrong;
  for (int64_t i = 0; i < state.elements && wrong.empty(); ++i) {
    float sum = 0;
    float expected = 0;
    for (int r = 0; r < contributors; ++r) {
      sum += views->pieces[static_cast<size_t>(r)][i];
      expected += ValueOf(
          state.round, state.members[static_cast<size_t>(r)], group.rank() * state.elements + i);
    }
    if (std::memcmp(&sum, &expected, sizeof(sum)) != 0) {
      wrong =
          absl::StrCat("round ", state.round, ": sum ", i, " is ", sum, ", expected ", expected);
    }
  }
  const absl::Status done = group.ReleasePieces({plan::OpLabel::kReduceScatter, 1, 0});
  return done.ok() ? wrong : Fault(state, "release", done);
}

std::string GatherBytes(const ScriptState& state) {
  Communicator& group = state.group;
  std::vector<float> mine(static_cast<size_t>(state.elements));
  std::vector<float> all(static_cast<size_t>(state.elements * group.size()));
  Fill(state, mine.data());
  const absl::Status done = group.AllGatherBytes({plan::OpLabel::kStatsReduce, -1, 0},
                                                 std::as_bytes(std::span(mine)),
                                                 std::as_writable_bytes(std::span(all)));
  return done.ok() ? CheckGathered(state, all.data()) : Fault(state, "all_gather_bytes", done);
}

}  // namespace

Rendezvous Board::ForRank(int rank) {
  return [this, rank](std::string_view,
                      std::string record) -> absl::StatusOr<std::vector<std::string>> {
    std::unique_lock<std::mutex> lock(mutex_);
    records_[static_cast<size_t>(rank)] = std::move(record);
    ++published_;
    all_there_.notify_all();
    if (!all_there_.wait_for(
            lock, kTestTimeout, [this] { return published_ == records_.size(); })) {
      return absl::DeadlineExceededError("rendezvous: a rank is missing");
    }
    return records_;
  };
}

std::unique_ptr<Communicator> MakeCommunicator(const std::string& transport,
                                               int rank,
                                               int size,
                                               const Rendezvous& rendezvous) {
  if (transport == "nccl") {
    UseTestLibraries();
    auto hosted = CreateHostedNccl({.rank = rank,
                                    .size = size,
                                    .rendezvous = rendezvous,
                                    .setup_timeout = kTestTimeout,
                                    .check_collectives = true});
    EXPECT_TRUE(hosted.ok()) << hosted.status();
    return hosted.ok() ? std::move(hosted).value() : nullptr;
  }
  if (transport == "mixed") {
    auto mixed = CreateMixedCommunicator({.gloo = {.rank = rank,
                                                   .size = size,
                                                   .rendezvous = rendezvous,
                                                   .host_address = "127.0.0.1",
                                                   .timeout = kTestTimeout},
                                          .host_key = absl::StrCat("host ", rank / 2)});
    EXPECT_TRUE(mixed.ok()) << mixed.status();
    return mixed.ok() ? std::move(mixed).value() : nullptr;
  }
  auto group = CreateCommunicator({.transport = transport,
                                   .rank = rank,
                                   .size = size,
                                   .rendezvous = rendezvous,
                                   .host_address = "127.0.0.1",
                                   .timeout = kTestTimeout});
  EXPECT_TRUE(group.ok()) << group.status();
  return group.ok() ? std::move(group).value() : nullptr;
}

void RunRanks(const std::string& transport,
              int size,
              const std::function<void(Communicator&)>& body) {
  Board board(size);
  std::vector<std::unique_ptr<Communicator>> local(static_cast<size_t>(size));
  if (transport == "local") {
    auto group = CreateLocalGroup(size);
    ASSERT_TRUE(group.ok()) << group.status();
    local = std::move(group).value();
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Communicator> own = std::move(local[static_cast<size_t>(rank)]);
      if (own == nullptr) {
        own = MakeCommunicator(transport, rank, size, board.ForRank(rank));
      }
      if (own != nullptr) {
        body(*own);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

int64_t ScriptBytes(int size) {
  return kMaxElements * size * kFloatBytes;
}

std::string RunScript(Communicator& group, uint64_t seed, int rounds) {
  const int64_t arena_bytes = ScriptBytes(group.size());
  const absl::Status made = group.AllocateArena(
      {.private_bytes = 100, .symmetric_bytes = arena_bytes, .common_bytes = arena_bytes});
  if (!made.ok()) {
    return made.ToString();
  }
  ScriptPlace place = {.members = std::vector<int>(static_cast<size_t>(group.size())),
                       .common = group.arena(plan::MemoryKind::kCommon),
                       .symmetric = group.arena(plan::MemoryKind::kSymmetric)};
  std::iota(place.members.begin(), place.members.end(), 0);
  return RunScriptAt(group, place, seed, rounds);
}

std::string RunScriptAt(Communicator& group, const ScriptPlace& place, uint64_t seed, int rounds) {
  ScriptState state{.group = group,
                    .members = place.members,
                    .common = reinterpret_cast<float*>(place.common),
                    .symmetric = reinterpret_cast<float*>(place.symmetric)};
  const int64_t sizes[] = {0, 1, 3, 1000, 4096, 65536, kMaxElements};
  std::mt19937_64 random(seed);  // the same on every rank
  std::string wrong;
  for (state.round = 0; state.round < rounds && wrong.empty(); ++state.round) {
    state.elements = sizes[random() % std::size(sizes)];
    switch (random() % 4) {
      case 0:
        wrong = Gather(state, static_cast<int>(random() % 3));
        break;
      case 1:
        wrong =
            Exchange(state, static_cast<int>(random() % static_cast<uint64_t>(group.size() + 1)));
        break;
      case 2:
        wrong = GatherBytes(state);
        break;
      default: {
        const absl::Status done = group.Barrier({});
        wrong = done.ok() ? "" : Fault(state, "barrier", done);
      }
    }
  }
  return wrong;
}

}  // namespace ravel::comm
