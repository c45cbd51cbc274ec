#pragma once

// Looks at the paths of jobs that are to be accepted: which node is asked, how many looks a node
// does at once, and when an answer is given up. Time comes in as an argument; what is to be sent
// comes out.

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/path_facts.h"
#include "common/status.h"
#include "coordinator/fleet/fleet_messages.h"
#include "coordinator/fleet/membership.h"

namespace ravel::coordinator {

struct LookAnswer {
  // NotFound: no node of the kind is here. Unavailable: the node did not answer, or refused.
  // ResourceExhausted: too many looks wait.
  absl::Status status;
  std::string node_id = {};  // that was asked; empty: none
  PathFacts facts = {};
  int64_t answers = 1;  // of this wish, this one included
  // Nodes that were not asked although the wish is for each: of an older release, beyond
  // kMaxEach, or on their way back.
  int64_t unasked = 0;
};

struct LookWish {
  PathQuery query = {};
  bool cpu_devices = true;             // of the job: a node with such devices is asked
  std::set<std::string> but_not = {};  // nodes that are not asked
  // Asks each node that is here, also one that takes no work now; `done` is called for each.
  bool each = false;
  int64_t limit_ms = 0;                       // for all paths; the node is given up a little later
  std::function<void(LookAnswer)> done = {};  // once for each answer, from a call of NodeLooks
  // False: whoever asked is gone; `done` is not called then.
  std::function<bool()> wanted = {};
};

// A message to be sent.
struct LookOrder {
  StreamId stream = 0;
  Look look;
};

// Used only from the controller's strand.
class NodeLooks {
 public:
  static constexpr std::size_t kMaxWaiting = 256;
  static constexpr int64_t kMaxOfNode = 8;      // at once
  static constexpr std::size_t kMaxEach = 256;  // nodes that one wish asks
  // Beyond a look's limit, for its messages.
  static constexpr int64_t GraceMs(int64_t limit_ms) { return limit_ms / 10; }

  // No two processes of the coordinator use the same ids: an answer to an older one fits none.
  void SetTerm(int64_t term) { last_id_ = term << 32; }

  // `await_nodes`: nodes that were here before a restart are on their way back. Without it, and
  // without a node that can be asked, the answer comes at once.
  void Add(LookWish wish, const Membership& members, bool await_nodes, int64_t now_ms);
  // An answer that nobody waits for, or that comes from elsewhere, is dropped.
  void OnResult(StreamId stream, const LookResult& result);
  // Gives up whose node or time is gone and starts what can start; to be called after each of the
  // above and now and then.
  std::vector<LookOrder> Advance(const Membership& members, bool await_nodes, int64_t now_ms);

 private:
  // One of the answers to a wish.
  struct Part {
    LookWish wish;
    std::string node_id = {};  // that has to give it; empty: any of the right kind
    int64_t answers = 1;
    int64_t unasked = 0;

    void Answer(absl::Status status, const std::string& from = {}, PathFacts facts = {}) const;
  };
  struct Waiting {
    Part part;
    int64_t due_ms = 0;
  };
  struct Open {
    Part part;
    int64_t due_ms = 0;
    std::string node_id;
    StreamId stream = 0;
  };
  // The node with the fewest looks, or null; `any`: some node could be asked if it had time.
  const NodeRecord* Choose(const Part& part, const Membership& members, bool* any) const;
  static std::vector<Part> PartsOf(LookWish wish, const Membership& members, bool await_nodes);
  void GiveUpWaiting(const Membership& members, bool await_nodes, int64_t now_ms);
  void GiveUpOpen(const Membership& members, int64_t now_ms);

  std::list<Waiting> waiting_;              // in the order of asking
  std::map<int64_t, Open> open_;            // by look id
  std::map<std::string, int64_t> of_node_;  // open ones
  int64_t last_id_ = 0;
};

}  // namespace ravel::coordinator
