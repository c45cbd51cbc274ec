// JobsService: events, logs and metrics as streams. A stream is pulled: the next block is read when
// the client has taken the last, so a slow client costs no memory. Following works by notification:
// growth of a file or the end of the job rings the stream, which then reads what is new. "Over" is
// set behind what was handed to the writing thread, so a stream never ends before its last record.

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/api/job_view_proto.h"
#include "coordinator/api/jobs_service.h"
#include "coordinator/api/pull_stream_service.h"
#include "coordinator/api/request_checks_service.h"
#include "coordinator/jobs/job_controller.h"
#include "coordinator/store/log_reader.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kEventPage = 256;

// True once nothing more will come. Shared by the stream and whoever tells it.
using Over = std::shared_ptr<std::atomic<bool>>;

template <typename Message, typename Record>
StreamBlock<Message> BlockOf(const std::vector<Record>& records, bool over) {
  StreamBlock<Message> block;
  for (const Record& record : records) {
    block.messages.push_back(ToProto(record));
  }
  block.end = over && records.empty();
  return block;
}

// On the strand. The stream hears of growth until the job is over; what was handed to the writing
// thread before that is read first.
template <typename Message>
Over FollowFiles(const JobsServiceParts& parts,
                 const std::shared_ptr<PullStream<Message>>& stream,
                 const std::string& uid,
                 bool follow) {
  const Over over = std::make_shared<std::atomic<bool>>(!follow);
  if (!follow) {
    return over;
  }
  const uint64_t bell = parts.growth->Subscribe(uid, [stream] { stream->Notify(); });
  const WatchId watch = parts.controller->feed().Subscribe(
      uid, [files = parts.files, over, stream](const FeedItem& item) {
        if (std::holds_alternative<FeedEnd>(item)) {
          files->Post([over, stream] {
            *over = true;
            stream->Notify();
          });
        }
      });
  stream->AtEnd([parts, bell, watch] {
    parts.growth->Unsubscribe(bell);
    parts.strand->Post(
        [controller = parts.controller, watch] { controller->feed().Unsubscribe(watch); });
  });
  return over;
}

absl::Status CheckNumbers(const v1::StreamEventsRequest& /*asked*/) {
  return absl::OkStatus();
}

absl::Status CheckNumbers(const v1::StreamLogsRequest& asked) {
  return CheckCount("tail", asked.tail(), LogFilter::kMaxTail);
}

absl::Status CheckNumbers(const v1::StreamMetricsRequest& asked) {
  RETURN_IF_ERROR(CheckCount("from_step", asked.from_step(), INT64_MAX));
  RETURN_IF_ERROR(CheckCount("to_step", asked.to_step(), INT64_MAX));
  RETURN_IF_ERROR(CheckCount("every", asked.every(), INT64_MAX));
  return CheckCount("last", asked.last(), INT64_MAX);
}

// Checks a request and finds its job.
template <typename Request>
absl::StatusOr<JobView> Find(const JobController& controller, const Request& asked) {
  RETURN_IF_ERROR(CheckName(asked));
  RETURN_IF_ERROR(CheckNumbers(asked));
  return controller.Get(KeyOf(asked.namespace_(), asked.name()));
}

// Streams the records of a job's files. `open(uid, request)` makes their reader, on the thread that
// reads, once all that was handed to the writing thread before is there.
template <typename Message, typename Request, typename Open>
PullStream<Message>* StreamFiles(const JobsServiceParts& parts,
                                 const char* what,
                                 const Request& request,
                                 const Open& open) {
  auto stream = PullStream<Message>::Create(&parts.pools->io());
  parts.strand->PostNamed(what, [parts, stream, asked = request, open] {
    absl::StatusOr<JobView> view = Find(*parts.controller, asked);
    if (!view.ok()) {
      stream->Fail(view.status());
      return;
    }
    const std::string uid = view->record.uid;
    const bool follow = asked.follow() && !IsTerminal(view->record.state);
    const Over over = FollowFiles(parts, stream, uid, follow);
    parts.files->Post([stream, over, uid, asked, open] {
      using Reader = typename decltype(open(uid, asked))::value_type;
      const auto reader = std::make_shared<Reader>();
      stream->Start([=]() -> absl::StatusOr<StreamBlock<Message>> {
        if (*reader == nullptr) {
          ASSIGN_OR_RETURN(*reader, open(uid, asked));
        }
        const bool ended = *over;
        ASSIGN_OR_RETURN(const auto records, (*reader)->Next());
        return BlockOf<Message>(records, ended);
      });
    });
  });
  return stream.get();
}

}  // namespace

grpc::ServerWriteReactor<v1::JobEvent>* JobsService::StreamEvents(
    Context* /*context*/, const v1::StreamEventsRequest* request) {
  auto stream = PullStream<v1::JobEvent>::Create(&parts_.pools->io());
  parts_.strand->PostNamed("StreamEvents", [this, stream, asked = *request] {
    absl::StatusOr<JobView> view = Find(*parts_.controller, asked);
    if (!view.ok()) {
      stream->Fail(view.status());
      return;
    }
    const std::string uid = view->record.uid;
    const bool follow = asked.follow() && !IsTerminal(view->record.state);
    const Over over = std::make_shared<std::atomic<bool>>(!follow);
    if (follow) {
      const WatchId watch =
          parts_.controller->feed().Subscribe(uid, [over, stream](const FeedItem& item) {
            const bool end = std::holds_alternative<FeedEnd>(item);
            if (end || std::holds_alternative<JobEventRecord>(item)) {
              *over = *over || end;
              stream->Notify();
            }
          });
      stream->AtEnd([this, watch] {
        parts_.strand->Post(
            [controller = parts_.controller, watch] { controller->feed().Unsubscribe(watch); });
      });
    }
    auto after = std::make_shared<int64_t>(asked.after_seq());  // owned by the stream's `next`
    stream->Start([this, over, after, uid, name = view->record.name, since_ms = asked.since_ms()]()
                      -> absl::StatusOr<StreamBlock<v1::JobEvent>> {
      const bool ended = *over;
      StreamBlock<v1::JobEvent> block;
      while (block.messages.empty()) {
        ASSIGN_OR_RETURN(const std::vector<JobEventRecord> events,
                         parts_.controller->store().Events(uid, *after, kEventPage));
        for (const JobEventRecord& event : events) {
          *after = event.seq;
          if (event.time_ms >= since_ms) {
            block.messages.push_back(ToProto(event, name));
          }
        }
        if (events.empty()) {
          break;
        }
      }
      block.end = ended && block.messages.empty();
      return block;
    });
  });
  return stream.get();
}

grpc::ServerWriteReactor<v1::LogLine>* JobsService::StreamLogs(
    Context* /*context*/, const v1::StreamLogsRequest* request) {
  return StreamFiles<v1::LogLine>(
      parts_,
      "StreamLogs",
      *request,
      [directory = parts_.controller->logs().directory()](
          const std::string& uid,
          const v1::StreamLogsRequest& asked) -> absl::StatusOr<std::unique_ptr<LogReader>> {
        const LogFilter filter{asked.attempt(), asked.rank(), asked.since_ms(), asked.tail()};
        return std::make_unique<LogReader>(directory, uid, filter);
      });
}

grpc::ServerWriteReactor<v1::StepRecord>* JobsService::StreamMetrics(
    Context* /*context*/, const v1::StreamMetricsRequest* request) {
  return StreamFiles<v1::StepRecord>(
      parts_,
      "StreamMetrics",
      *request,
      [history = parts_.history](const std::string& uid, const v1::StreamMetricsRequest& asked) {
        StepRange range;
        range.from = asked.from_step();
        range.to = asked.to_step() > 0 ? asked.to_step() : INT64_MAX;
        range.every = asked.every();
        range.last = asked.last();
        range.all = asked.all();
        return history->Open(uid, range);
      });
}

}  // namespace ravel::coordinator
