#include "tests/testing/store_process.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

}  // namespace

StoreProcess::StoreProcess(StorePlace place) : place_(std::move(place)) {
  std::filesystem::create_directories(Seen() + "/data");
}

absl::Status StoreProcess::Start(const std::map<std::string, std::string>& environment) {
  Kill();
  std::filesystem::remove(Seen() + "/port");
  ProcessOptions options;
  options.arguments = place_.host;
  for (const std::string& argument : {BinaryPath("ravel-store"),
                                      std::string("--data"),
                                      place_.folder + "/data",
                                      std::string("--listen"),
                                      absl::StrCat(place_.address, ":", port_),
                                      std::string("--port-file"),
                                      place_.folder + "/port",
                                      std::string("--min-free"),
                                      std::string("0"),
                                      std::string("--enable-faults")}) {
    options.arguments.push_back(argument);
  }
  options.arguments.insert(options.arguments.end(), place_.flags.begin(), place_.flags.end());
  options.environment = environment;
  options.output_path = options.error_path = Seen() + "/log";
  ASSIGN_OR_RETURN(process_, ChildProcess::Start(options));
  const bool up = Eventually(seconds(20), [&] {
    return absl::SimpleAtoi(absl::StripAsciiWhitespace(ReadText(Seen() + "/port")), &port_) ||
           !process_->Running();
  });
  return up && process_->Running() ? absl::OkStatus()
                                   : absl::UnavailableError(absl::StrCat("no store: ", Log()));
}

void StoreProcess::Kill() {
  if (process_ != nullptr && !place_.host.empty()) {
    process_->KillInner();
  }
  process_.reset();
}

absl::Status StoreProcess::KillAndStart() {
  Kill();
  return Start();
}

bool StoreProcess::WaitForDeath() {
  return process_->Wait(seconds(30)).has_value();
}

std::string StoreProcess::Url(const std::string& path) const {
  return absl::StrCat("ravel://", place_.address, ":", port_, "/", path);
}

}  // namespace ravel::testing
