#include "tests/fuzz/service_calls_client.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/testing/fuzz_proto.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using google::protobuf::Message;
using google::protobuf::MessageFactory;
using google::protobuf::MethodDescriptor;

constexpr size_t kMostStreamed = 6;
constexpr std::chrono::milliseconds kStreamTime{40};  // of calls that need not end

std::string MethodPath(const MethodDescriptor& method) {
  return absl::StrCat("/", method.service()->full_name(), "/", method.name());
}

// Draws for the calls of one method.
class MethodFuzz {
 public:
  MethodFuzz(const ServiceFuzz& fuzz, const MethodDescriptor& method)
      : fuzz_(fuzz),
        method_(method),
        path_(MethodPath(method)),
        prototype_(*MessageFactory::generated_factory()->GetPrototype(method.input_type())) {
    const auto found = fuzz.seeds.find(method.input_type()->full_name());
    seeds_ = found == fuzz.seeds.end() ? std::vector<std::string>{""} : found->second;
  }

  RawCall Draw(FuzzRandom& random) const {
    RawCall call{.method = path_, .messages = {}};
    const size_t messages =
        method_.client_streaming() ? 1 + random.Below(kMostStreamed) : size_t{1};
    for (size_t i = 0; i < messages; ++i) {
      call.messages.push_back(Request(i, random));
    }
    if (method_.server_streaming()) {
      call.deadline = kStreamTime;
    }
    return call;
  }

 private:
  std::string Request(size_t index, FuzzRandom& random) const {
    // A stream begins with its first seed as it is, mostly, so that what follows it is read.
    if (method_.client_streaming() && index == 0 && !random.OneIn(4)) {
      return seeds_[0];
    }
    const std::string& seed = seeds_[random.Below(seeds_.size())];
    if (random.OneIn(8)) {
      return MutateInput(FuzzForm::kBytes, {seed}, random);
    }
    const std::unique_ptr<Message> message(prototype_.New());
    message->ParsePartialFromString(seed);
    const bool changes = fuzz_.changes && fuzz_.changes(path_);
    for (size_t i = 0; i < 1 + random.Below(3); ++i) {
      MutateMessage(*message, changes ? fuzz_.words_of_changes : fuzz_.words, random);
    }
    return message->SerializePartialAsString();
  }

  const ServiceFuzz& fuzz_;
  const MethodDescriptor& method_;
  const std::string path_;
  const Message& prototype_;
  std::vector<std::string> seeds_;
};

}  // namespace

ServiceCounts FuzzServices(const ServiceFuzz& fuzz) {
  SilenceProtobuf();
  const int64_t seed = EnvironmentNumber("RAVEL_FUZZ_SEED", 1);
  const int64_t requests =
      std::max<int64_t>(1, fuzz.requests * EnvironmentNumber("RAVEL_FUZZ_RUNS", 300) / 300);
  ServiceCounts counts;
  std::vector<const MethodDescriptor*> methods;
  for (const auto* file : fuzz.files) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        methods.push_back(file->service(i)->method(j));
      }
    }
  }
  // Methods take turns: each meets what the others have left.
  for (int64_t number = 0; number < requests; ++number) {
    for (const MethodDescriptor* const method : methods) {
      const uint64_t place = static_cast<uint64_t>(method->index()) * 1'000'003 +
                             static_cast<uint64_t>(method->service()->full_name().size());
      FuzzRandom random(static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15u +
                        static_cast<uint64_t>(number) * 0xD1342543DE82EF95u + place);
      const RawCall call = MethodFuzz(fuzz, *method).Draw(random);
      const RawAnswer answer = CallRaw(fuzz.channel, call);
      ++counts.calls[call.method];
      ++counts.codes[answer.status.error_code()];
      if (answer.status.ok() && fuzz.accepted) {
        fuzz.accepted(call, answer);
      }
      if (!fuzz.alive()) {
        ADD_FAILURE() << "the server is gone after request " << number << " of " << call.method
                      << ", RAVEL_FUZZ_SEED=" << seed;
        return counts;
      }
    }
  }
  return counts;
}

std::string Summary(const ServiceCounts& counts) {
  int64_t calls = 0;
  std::string text;
  for (const auto& [method, count] : counts.calls) {
    calls += count;
  }
  for (const auto& [code, count] : counts.codes) {
    absl::StrAppend(&text, " code ", code, ": ", count);
  }
  return absl::StrCat(calls, " calls of ", counts.calls.size(), " methods;", text);
}

}  // namespace ravel::testing
