#pragma once

// A coordinator's Fleet service in the test's process: takes what daemons say, says what the test
// wants.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/fleet.pb.h"

namespace ravel::daemon {

// Thread-safe. Answers Hello with Welcome and each beat with an ack, before it shows either.
class FakeFleet {
 public:
  struct Options {
    int64_t term = 1;
    std::string cluster_id = "cluster-1";
    int64_t beat_interval_ms = 50;
    int port = 0;             // 0: any
    bool acknowledge = true;  // beats
    std::string reject = {};  // answers Hello with this refusal
    std::string plan = "the plan";
    std::vector<v1::HeldTrainer> stop = {};  // in Welcome
    int64_t protocol = 1;                    // in Welcome
  };
  static std::unique_ptr<FakeFleet> Start(Options options);
  virtual ~FakeFleet() = default;

  virtual std::string address() const = 0;
  virtual int port() const = 0;
  // To the newest stream, with the term of the options unless the message has one; returns its
  // command id.
  virtual int64_t Send(v1::Down message) = 0;
  // Ends the newest stream.
  virtual void Disconnect() = 0;
  virtual void SetAcknowledge(bool acknowledge) = 0;
  // False: a plan that is fetched from now on does not come.
  virtual void SetPlansCome(bool come) = 0;
  // Plans that are being fetched.
  virtual int plans_held() const = 0;

  // All messages so far, in order; beats only if they carry trainers.
  virtual std::vector<v1::Up> received() const = 0;
  int Count(const std::function<bool(const v1::Up&)>& matches) const;
  // The `index`-th match, waiting for it; fails the test and returns an empty message when there is
  // none in 30 s.
  v1::Up WaitFor(const std::function<bool(const v1::Up&)>& matches, int index = 0) const;
};

}  // namespace ravel::daemon
