// JobsService: lists, a page at a time. A page is small enough for the strand and for a message; a
// cursor names the last thing of the page before, so that what comes and goes between two pages
// neither hides nor repeats anything else.

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "coordinator/api/job_view_proto.h"
#include "coordinator/api/jobs_service.h"
#include "coordinator/api/request_checks_service.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr int kMaxPage = 500;
constexpr int kMaxEventPage = 1000;
constexpr int64_t kMaxPageBytes = int64_t{2} << 20;  // one more item of 1 MiB still fits a message
constexpr size_t kMaxTokenBytes = 512;
// Jobs that a page looks at: a selector that nothing matches must not hold the strand.
constexpr int kMaxLooked = 20'000;

int PageSize(int32_t asked, int most) {
  return asked == 0 ? most : asked;
}

using Labels = std::vector<std::pair<std::string, std::string>>;

// `key=value,...`, each of which a label must have.
absl::StatusOr<Labels> ParseSelector(const std::string& selector) {
  RETURN_IF_ERROR(CheckPlainText("selector", selector, kMaxFieldBytes));
  Labels wanted;
  for (const absl::string_view part : absl::StrSplit(selector, ',', absl::SkipEmpty())) {
    const std::vector<std::string> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
    if (pair.size() != 2 || pair[0].empty()) {
      return absl::InvalidArgumentError(absl::StrCat("selector: expected key=value, got ", part));
    }
    wanted.emplace_back(pair[0], pair[1]);
  }
  return wanted;
}

bool HasLabels(const v1::Job& job, const Labels& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&job](const auto& label) {
    const auto found = job.metadata().labels().find(label.first);
    return found != job.metadata().labels().end() && found->second == label.second;
  });
}

std::string TokenOf(const JobCursor& cursor) {
  return absl::StrCat(cursor.created_ms, ".", cursor.uid);
}

absl::StatusOr<JobCursor> ParseToken(const std::string& token) {
  JobCursor cursor;
  if (token.empty()) {
    return cursor;
  }
  const size_t dot = token.find('.');
  if (token.size() > kMaxTokenBytes || dot == std::string::npos ||
      !absl::SimpleAtoi(token.substr(0, dot), &cursor.created_ms)) {
    return absl::InvalidArgumentError("page_token: expected what an answer gave");
  }
  cursor.uid = token.substr(dot + 1);
  return cursor;
}

struct JobFilter {
  std::string scope;  // a namespace, or * for all
  Labels labels;
  std::set<int> states;  // empty: all
  JobCursor after;
  int page = kMaxPage;
  bool with_spec = false;
};

absl::StatusOr<JobFilter> ParseFilter(const v1::ListJobsRequest& request) {
  RETURN_IF_ERROR(CheckPlainText("namespace", request.namespace_(), kMaxNameBytes));
  JobFilter filter;
  filter.scope = request.namespace_().empty() ? "default" : request.namespace_();
  ASSIGN_OR_RETURN(filter.labels, ParseSelector(request.selector()));
  ASSIGN_OR_RETURN(filter.after, ParseToken(request.page_token()));
  for (const int state : request.states()) {
    filter.states.insert(state);
  }
  RETURN_IF_ERROR(CheckCount("page_size", request.page_size(), kMaxPage));
  filter.page = PageSize(request.page_size(), kMaxPage);
  filter.with_spec = request.with_spec();
  return filter;
}

void FillPage(const JobController& controller,
              const JobFilter& filter,
              v1::ListJobsResponse& response) {
  int64_t bytes = 0;
  int looked = 0;
  JobCursor last;
  controller.VisitJobs(filter.after, [&](const JobGlimpse& glimpse) {
    if (response.jobs_size() >= filter.page || bytes >= kMaxPageBytes || looked >= kMaxLooked) {
      response.set_next_page_token(TokenOf(last));
      return false;
    }
    looked += 1;
    last = {glimpse.record.created_ms, glimpse.record.uid};
    const bool here = filter.scope == "*" || glimpse.record.namespace_name == filter.scope;
    const int state = static_cast<int>(glimpse.record.state);
    if (!here || (!filter.states.empty() && !filter.states.contains(state))) {
      return true;
    }
    v1::Job job = ToProto(glimpse, filter.with_spec);
    if (HasLabels(job, filter.labels)) {
      if (std::string why = controller.WhyQueued(glimpse.record.uid); !why.empty()) {
        job.set_message(std::move(why));
      }
      bytes += static_cast<int64_t>(job.ByteSizeLong());
      *response.add_jobs() = std::move(job);
    }
    return true;
  });
  response.set_resource_version(controller.resource_version());
}

}  // namespace

grpc::ServerUnaryReactor* JobsService::ListJobs(Context* context,
                                                const v1::ListJobsRequest* request,
                                                v1::ListJobsResponse* response) {
  Unary* reactor = context->DefaultReactor();
  absl::StatusOr<JobFilter> filter = ParseFilter(*request);
  if (!filter.ok()) {
    reactor->Finish(ToGrpc(filter.status()));
    return reactor;
  }
  parts_.strand->PostNamed("ListJobs", [this, response, reactor, filter = *std::move(filter)] {
    FillPage(*parts_.controller, filter, *response);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::ListEvents(Context* context,
                                                  const v1::ListEventsRequest* request,
                                                  v1::ListEventsResponse* response) {
  Unary* reactor = context->DefaultReactor();
  absl::Status valid = CheckName(*request);
  valid.Update(CheckCount("page_size", request->page_size(), kMaxEventPage));
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("ListEvents", [this, request, response, reactor] {
    const absl::StatusOr<JobView> view =
        parts_.controller->Get(KeyOf(request->namespace_(), request->name()));
    if (!view.ok()) {
      reactor->Finish(ToGrpc(view.status()));
      return;
    }
    const int page = PageSize(request->page_size(), kMaxEventPage);
    const auto events =
        parts_.controller->store().Events(view->record.uid, request->after_seq(), page + 1);
    int64_t bytes = 0;
    for (size_t i = 0; events.ok() && i < events->size(); ++i) {
      if (response->events_size() == page || bytes >= kMaxPageBytes) {
        response->set_more(true);
        break;
      }
      *response->add_events() = ToProto((*events)[i], view->record.name);
      bytes += static_cast<int64_t>(response->events(response->events_size() - 1).ByteSizeLong());
    }
    reactor->Finish(ToGrpc(events.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::ListNodes(Context* context,
                                                 const v1::ListNodesRequest* request,
                                                 v1::ListNodesResponse* response) {
  Unary* reactor = context->DefaultReactor();
  absl::Status valid = CheckPlainText("page_token", request->page_token(), kMaxTokenBytes);
  valid.Update(CheckCount("page_size", request->page_size(), kMaxPage));
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("ListNodes", [this, request, response, reactor] {
    const int page = PageSize(request->page_size(), kMaxPage);
    // By id, which is the cursor.
    for (const NodeView& view : parts_.controller->Nodes()) {
      const std::string& id = view.record.facts.node_id;
      if (!request->page_token().empty() && id <= request->page_token()) {
        continue;
      }
      if (response->nodes_size() == page) {
        response->set_next_page_token(response->nodes(page - 1).id());
        break;
      }
      *response->add_nodes() = ToProto(view);
    }
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::ForgetNode(Context* context,
                                                  const v1::ForgetNodeRequest* request,
                                                  v1::ForgetNodeResponse* /*response*/) {
  Unary* reactor = context->DefaultReactor();
  if (const absl::Status valid = CheckPlainText("node", request->node(), kMaxNameBytes);
      !valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("ForgetNode", [this, request, reactor] {
    parts_.controller->ForgetNode(request->node(), [reactor](const absl::Status& status) {
      reactor->Finish(ToGrpc(status));
    });
  });
  return reactor;
}

}  // namespace ravel::coordinator
