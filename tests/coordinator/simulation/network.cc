#include "tests/coordinator/simulation/network.h"

#include <algorithm>
#include <utility>

namespace ravel::coordinator::simulation {

Network::Network(Events& events, Random& random, Ends ends)
    : events_(events), random_(random), ends_(std::move(ends)) {}

Network::Stream* Network::Find(StreamId id) {
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : &found->second;
}

int64_t Network::Latency() {
  // Most are quick, one in fifty waits for something.
  return random_.Chance(0.02) ? random_.Between(0, 20 * most_latency_us_)
                              : random_.Between(50, most_latency_us_);
}

StreamId Network::Open(const std::string& node, bool coordinator_is_here) {
  const StreamId id = ++last_;
  streams_[id].node = node;
  const Blocked& blocked = blocked_[node];
  if (!coordinator_is_here) {
    streams_[id].open_above = false;
    NoticeBelow(id, random_.Between(500, 5000));
  } else if (std::max(blocked.up_until_us, blocked.down_until_us) > events_.now_us()) {
    streams_[id].swallows_up = true;  // a connection is not made: the daemon gives up some time
    streams_[id].swallows_down = true;
    streams_[id].open_above = false;
  }
  return id;
}

void Network::SendUp(StreamId stream, Up message) {
  Stream* found = Find(stream);
  if (found == nullptr || !found->open_below || found->swallows_up || !found->open_above) {
    return;
  }
  const bool twice = repeats_ && std::holds_alternative<UpMessage>(message) && random_.Chance(0.02);
  for (int copy = 0; copy < (twice ? 2 : 1); ++copy) {
    found->up_ready_us = std::max(found->up_ready_us, events_.now_us() + Latency());
    found->up.emplace_back(found->up_ready_us, message);
    events_.At(found->up_ready_us - events_.now_us(), [this, stream] { PumpUp(stream); });
  }
}

void Network::SendDown(StreamId stream, DownMessage message) {
  Stream* found = Find(stream);
  if (found == nullptr || !found->open_above || found->swallows_down || !found->open_below) {
    return;
  }
  const bool command = !std::holds_alternative<Welcome>(message.kind);
  const bool twice = repeats_ && command && random_.Chance(0.02);
  for (int copy = 0; copy < (twice ? 2 : 1); ++copy) {
    found->down_ready_us = std::max(found->down_ready_us, events_.now_us() + Latency());
    found->down.emplace_back(found->down_ready_us, message);
    events_.At(found->down_ready_us - events_.now_us(), [this, stream] { PumpDown(stream); });
  }
}

void Network::PumpUp(StreamId id) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->up.empty() || stream->up.front().first > events_.now_us()) {
    return;
  }
  const int64_t blocked_us = blocked_[stream->node].up_until_us - events_.now_us();
  if (blocked_us > 0) {
    events_.At(blocked_us + 1, [this, id] { PumpUp(id); });
    return;
  }
  Up message = std::move(stream->up.front().second);
  stream->up.pop_front();
  if (!stream->up.empty() && stream->up.front().first <= events_.now_us()) {
    events_.At(1, [this, id] { PumpUp(id); });
  }
  if (stream->open_above && !stream->swallows_up && events_.now_us() <= stream->up_until_us) {
    ends_.up(id, message);
  }
}

void Network::PumpDown(StreamId id) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->down.empty() || stream->down.front().first > events_.now_us()) {
    return;
  }
  const int64_t blocked_us = blocked_[stream->node].down_until_us - events_.now_us();
  if (blocked_us > 0) {
    events_.At(blocked_us + 1, [this, id] { PumpDown(id); });
    return;
  }
  std::variant<DownMessage, End> message = std::move(stream->down.front().second);
  stream->down.pop_front();
  if (!stream->down.empty() && stream->down.front().first <= events_.now_us()) {
    events_.At(1, [this, id] { PumpDown(id); });
  }
  if (!stream->open_below || stream->swallows_down) {
    return;
  }
  if (const auto* words = std::get_if<DownMessage>(&message)) {
    ends_.down(id, *words);
  } else {
    NoticeBelow(id, 0);
  }
}

void Network::NoticeBelow(StreamId id, int64_t after_us) {
  events_.At(after_us, [this, id] {
    Stream* stream = Find(id);
    if (stream != nullptr && stream->open_below) {
      stream->open_below = false;
      Forget(id);
      ends_.closed_below(id);
    }
  });
}

void Network::NoticeAbove(StreamId id, int64_t after_us) {
  events_.At(after_us, [this, id] {
    Stream* stream = Find(id);
    if (stream != nullptr && stream->open_above) {
      stream->open_above = false;
      Forget(id);
      ends_.closed_above(id);
    }
  });
}

void Network::Forget(StreamId id) {
  const auto found = streams_.find(id);
  if (found != streams_.end() && !found->second.open_above && !found->second.open_below) {
    streams_.erase(found);
  }
}

void Network::CloseFromAbove(StreamId stream) {
  Stream* found = Find(stream);
  if (found == nullptr || !found->open_above) {
    return;
  }
  const int64_t after_us = random_.Between(100, 20'000);
  found->up_until_us = std::min(found->up_until_us, events_.now_us() + after_us);
  NoticeAbove(stream, after_us);
  found->down_ready_us = std::max(found->down_ready_us, events_.now_us() + Latency());
  found->down.emplace_back(found->down_ready_us, End());
  events_.At(found->down_ready_us - events_.now_us(), [this, stream] { PumpDown(stream); });
}

void Network::CloseFromBelow(StreamId stream) {
  Stream* found = Find(stream);
  if (found == nullptr || !found->open_below) {
    return;
  }
  found->open_below = false;
  const int64_t blocked_us = blocked_[found->node].up_until_us - events_.now_us();
  if (found->open_above && !found->swallows_up) {
    // What was written may still come, up to some moment.
    const int64_t after_us = std::max<int64_t>(blocked_us, 0) + random_.Between(100, 50'000);
    found->up_until_us = events_.now_us() + random_.Between(0, after_us);
    NoticeAbove(stream, after_us);
  }
  Forget(stream);
}

void Network::Break(StreamId stream, int64_t noticed_above_after_us) {
  Stream* found = Find(stream);
  if (found == nullptr) {
    return;
  }
  found->swallows_down = true;
  found->up_until_us = events_.now_us() + (random_.Chance(0.5) ? random_.Between(0, 5000) : 0);
  NoticeBelow(stream, random_.Between(0, 3000));
  NoticeAbove(stream, std::max(noticed_above_after_us, found->up_until_us - events_.now_us() + 1));
}

void Network::SwallowUp(StreamId stream) {
  if (Stream* found = Find(stream)) {
    found->swallows_up = true;
  }
}

void Network::SwallowDown(StreamId stream) {
  if (Stream* found = Find(stream)) {
    found->swallows_down = true;
  }
}

void Network::Partition(const std::string& node, bool up, bool down, int64_t for_us) {
  Blocked& blocked = blocked_[node];
  blocked.up_until_us = up ? events_.now_us() + for_us : blocked.up_until_us;
  blocked.down_until_us = down ? events_.now_us() + for_us : blocked.down_until_us;
}

void Network::LoseCoordinator() {
  for (auto& [id, stream] : streams_) {
    if (stream.open_above) {
      stream.open_above = false;
      // Mostly the kernel resets the connections at once.
      NoticeBelow(id, random_.Between(0, 3000));
    }
  }
}

void Network::Heal() {
  for (auto& [node, blocked] : blocked_) {
    blocked = Blocked();
  }
  for (auto& [id, stream] : streams_) {
    events_.At(1, [this, stream_id = id] {
      PumpUp(stream_id);
      PumpDown(stream_id);
    });
  }
}

}  // namespace ravel::coordinator::simulation
