#include "tests/bench/load_client.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <grpcpp/grpcpp.h>

#include "common/crypto.h"
#include "proto/jobs.grpc.pb.h"
#include "tests/testing/eventually.h"

namespace ravel::bench {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kDeadline{20};
constexpr milliseconds kBetweenLists{500};
constexpr milliseconds kBetweenGets{100};
constexpr int kMaxMessageBytes = 256 << 20;  // all jobs in one answer, where there are no pages

double SecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// Power of two at or above: the lanes that a job of that many devices gets.
int64_t Lanes(int64_t devices) {
  int64_t lanes = 1;
  while (lanes < devices) {
    lanes *= 2;
  }
  return lanes;
}

v1::TrainingJob MakeJob(const JobShape& shape) {
  v1::TrainingJob job;
  job.set_api_version("ravel/v1");
  job.set_kind("TrainingJob");
  job.mutable_metadata()->set_name(shape.name);
  v1::JobSpec& spec = *job.mutable_spec();
  v1::ModelConfig& model = *spec.mutable_model()->mutable_config();
  model.set_vocab_size(97);
  model.set_hidden_size(32);
  model.set_intermediate_size(64);
  model.set_num_hidden_layers(2);
  model.set_num_attention_heads(2);
  model.set_max_position_embeddings(16);
  v1::DataSpec& data = *spec.mutable_data();
  data.add_train()->set_path(shape.tokens_path);
  data.set_format("flat_u16");
  data.set_sequence_length(16);
  v1::TrainingSpec& training = *spec.mutable_training();
  training.set_steps(1'000'000);
  training.set_global_batch(Lanes(shape.devices));
  training.mutable_optimizer()->set_lr(1e-3);
  // With one unit for all devices the smallest model can be cut for any number of them.
  spec.mutable_parallelism()->set_allow_padding(true);
  spec.mutable_devices()->set_kind("cpu");
  spec.mutable_devices()->set_count(shape.devices);
  spec.mutable_checkpoint()->set_store("file://" + shape.store);
  return job;
}

class GrpcConnection final : public JobsConnection {
 public:
  explicit GrpcConnection(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    stub_ = v1::Jobs::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }

  absl::StatusOr<std::string> Submit(const JobShape& shape) override {
    v1::SubmitJobRequest request;
    request.set_request_id(RandomHex(16));
    *request.mutable_job() = MakeJob(shape);
    v1::SubmitJobResponse response;
    const grpc::Status status = Call(&v1::Jobs::Stub::SubmitJob, request, response);
    return status.ok() ? absl::StatusOr<std::string>(response.job().uid()) : FromGrpc(status);
  }

  absl::StatusOr<JobState> Get(const std::string& name) override {
    v1::GetJobRequest request;
    request.set_name(name);
    v1::Job job;
    const grpc::Status status = Call(&v1::Jobs::Stub::GetJob, request, job);
    return status.ok()
               ? absl::StatusOr<JobState>(JobState{job.epoch(), v1::JobState_Name(job.state())})
               : FromGrpc(status);
  }

  absl::StatusOr<int64_t> List() override {
    v1::ListJobsResponse response;
    const grpc::Status status = Call(&v1::Jobs::Stub::ListJobs, v1::ListJobsRequest(), response);
    return status.ok() ? absl::StatusOr<int64_t>(response.jobs_size()) : FromGrpc(status);
  }

  absl::StatusOr<ServerState> Server() override {
    v1::ServerInfoResponse response;
    const grpc::Status status =
        Call(&v1::Jobs::Stub::ServerInfo, v1::ServerInfoRequest(), response);
    if (!status.ok()) {
      return FromGrpc(status);
    }
    ServerState state{.text = response.ShortDebugString()};
    if (response.has_lag_recent()) {
      state.strand_lag_p99 = static_cast<double>(response.lag_recent().p99_ms());
    }
    return state;
  }

 private:
  template <typename Method, typename Request, typename Response>
  grpc::Status Call(Method method, const Request& request, Response& response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    context.set_wait_for_ready(true);
    return (stub_.get()->*method)(&context, request, &response);
  }
  std::unique_ptr<v1::Jobs::Stub> stub_;
};

}  // namespace

std::unique_ptr<JobsConnection> JobsConnection::Open(const std::string& address) {
  return std::make_unique<GrpcConnection>(address);
}

double Percentile(Samples samples, double percent) {
  if (samples.empty()) {
    return -1;
  }
  const auto rank = static_cast<size_t>(
      std::ceil(percent / 100 * static_cast<double>(samples.size())) - (percent > 0 ? 1 : 0));
  const size_t place = std::min(rank, samples.size() - 1);
  std::nth_element(samples.begin(), samples.begin() + static_cast<ptrdiff_t>(place), samples.end());
  return samples[place];
}

// -- submits

Submitter::Submitter(Options options) : options_(std::move(options)), started_(SteadyClock::now()) {
  for (int i = 0; i < options_.connections; ++i) {
    threads_.emplace_back([this] { Work(); });
  }
}

Submitter::~Submitter() {
  Stop();
  Wait();
}

void Submitter::Stop() {
  stopping_ = true;
}

void Submitter::Wait() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) {
      thread.join();
    }
  }
}

void Submitter::Work() {
  const std::unique_ptr<JobsConnection> jobs = JobsConnection::Open(options_.address);
  while (!stopping_ && SteadyClock::now() - started_ < options_.limit) {
    const int64_t number = next_++;
    if (number >= options_.count) {
      return;
    }
    if (options_.rate > 0) {
      const double due = static_cast<double>(number) / options_.rate;
      while (!stopping_ && SecondsSince(started_) < due) {
        testing::PauseBetweenLooks(milliseconds(1));
      }
    }
    JobShape shape{
        .name = absl::StrCat(options_.prefix, number),
        .devices = options_.devices[static_cast<size_t>(number) % options_.devices.size()],
        .tokens_path = options_.tokens_path,
        .store = options_.store};
    const SteadyClock::time_point sent = SteadyClock::now();
    const absl::StatusOr<std::string> uid = jobs->Submit(shape);
    const MutexLock lock(mutex_);
    if (uid.ok()) {
      latencies_.push_back(1000 * SecondsSince(sent));
      answered_.push_back(SecondsSince(started_));
      names_[*uid] = shape.name;
    } else if (refused_++ == 0) {
      first_error_ = uid.status().ToString();
    }
  }
}

Samples Submitter::latencies() const {
  const MutexLock lock(mutex_);
  return latencies_;
}

int64_t Submitter::accepted() const {
  const MutexLock lock(mutex_);
  return static_cast<int64_t>(answered_.size());
}

int64_t Submitter::refused() const {
  const MutexLock lock(mutex_);
  return refused_;
}

std::string Submitter::first_error() const {
  const MutexLock lock(mutex_);
  return first_error_;
}

std::map<std::string, std::string> Submitter::names() const {
  const MutexLock lock(mutex_);
  return names_;
}

double Submitter::seconds() const {
  const MutexLock lock(mutex_);
  return answered_.empty() ? 0 : answered_.back();
}

std::vector<double> Submitter::RatesBy(size_t window) const {
  const MutexLock lock(mutex_);
  std::vector<double> rates;
  for (size_t end = window; end <= answered_.size(); end += window) {
    const double since = end == window ? 0 : answered_[end - window - 1];
    rates.push_back(static_cast<double>(window) / (answered_[end - 1] - since));
  }
  return rates;
}

// -- reads

Reader::Reader(std::string address, std::string job)
    : address_(std::move(address)), job_(std::move(job)) {
  threads_.emplace_back([this] { Work(true); });
  threads_.emplace_back([this] { Work(false); });
}

Reader::~Reader() {
  stopping_ = true;
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void Reader::Work(bool list) {
  const std::unique_ptr<JobsConnection> jobs = JobsConnection::Open(address_);
  while (!stopping_) {
    const SteadyClock::time_point sent = SteadyClock::now();
    const absl::Status done = list ? jobs->List().status() : jobs->Get(job_).status();
    {
      const MutexLock lock(mutex_);
      failed_ += done.ok() ? 0 : 1;
      (list ? lists_ : gets_).push_back(1000 * SecondsSince(sent));
    }
    testing::PauseBetweenLooks(list ? kBetweenLists : kBetweenGets);
  }
}

Samples Reader::lists() const {
  const MutexLock lock(mutex_);
  return lists_;
}

Samples Reader::gets() const {
  const MutexLock lock(mutex_);
  return gets_;
}

int64_t Reader::failed() const {
  const MutexLock lock(mutex_);
  return failed_;
}

}  // namespace ravel::bench
