#include "tests/testing/raw_calls_client.h"

#include <utility>

#include <grpcpp/generic/generic_stub.h>

namespace ravel::testing {
namespace {

std::string TextOf(grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (buffer.Dump(&slices).ok()) {
    for (const grpc::Slice& slice : slices) {
      text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
  }
  return text;
}

// Waits for the one operation that is under way.
bool Done(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  return queue.Next(&tag, &ok) && ok;
}

}  // namespace

RawAnswer CallRaw(const std::shared_ptr<grpc::Channel>& channel, const RawCall& call) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + call.deadline);
  const std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream =
      stub.PrepareCall(&context, call.method, &queue);
  int tag = 0;
  stream->StartCall(&tag);
  bool open = Done(queue);
  for (size_t i = 0; open && i < call.messages.size(); ++i) {
    const grpc::Slice slice(call.messages[i]);
    stream->Write(grpc::ByteBuffer(&slice, 1), &tag);
    open = Done(queue);
  }
  if (open) {
    stream->WritesDone(&tag);
    Done(queue);
  }
  RawAnswer answer;
  while (answer.messages.size() < call.most_answers) {
    grpc::ByteBuffer buffer;
    stream->Read(&buffer, &tag);
    if (!Done(queue)) {
      break;
    }
    answer.messages.push_back(TextOf(buffer));
  }
  if (answer.messages.size() == call.most_answers) {
    context.TryCancel();
  }
  stream->Finish(&answer.status, &tag);
  Done(queue);
  queue.Shutdown();
  return answer;
}

bool IsServing(const std::shared_ptr<grpc::Channel>& channel) {
  const RawAnswer answer =
      CallRaw(channel, {.method = "/grpc.health.v1.Health/Check", .messages = {""}});
  return answer.status.ok() && answer.messages == std::vector<std::string>{"\x08\x01"};
}

}  // namespace ravel::testing
