#include "coordinator/ctl/trace_verbs.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/file_writer.h"
#include "common/trace.h"
#include "coordinator/ctl/exit_code.h"

namespace ravel::ctl {
namespace {

// Files as they are, directories as their *.trace.json, sorted.
absl::StatusOr<std::vector<std::string>> TraceFiles(const std::vector<std::string>& inputs) {
  std::vector<std::string> files;
  for (const std::string& input : inputs) {
    std::error_code error;
    if (!std::filesystem::is_directory(input, error)) {
      files.push_back(input);
      continue;
    }
    const size_t before = files.size();
    for (std::filesystem::directory_iterator at(input, error), end; !error && at != end;
         at.increment(error)) {
      if (absl::EndsWith(at->path().string(), ".trace.json")) {
        files.push_back(at->path().string());
      }
    }
    if (error) {
      return absl::InternalError(absl::StrCat(input, ": ", error.message()));
    }
    if (files.size() == before) {
      return absl::NotFoundError(absl::StrCat(input, ": holds no *.trace.json"));
    }
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(before), files.end());
  }
  return files;
}

absl::StatusOr<json::Value> LoadAll(const TraceOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, TraceFiles(options.inputs));
  return trace::MergeChromeTraces(files);
}

}  // namespace

int RunTraceMerge(const CommonOptions& common, const TraceOptions& options) {
  const absl::StatusOr<json::Value> merged = LoadAll(options);
  if (!merged.ok()) {
    return Report(merged.status());
  }
  const absl::Status written = WriteFileAtomically(options.output, json::Serialize(*merged) + "\n");
  if (!written.ok()) {
    return Report(written);
  }
  const size_t ranks = merged->Find("otherData")->Find("ranks")->AsArray().size();
  const size_t events = merged->Find("traceEvents")->AsArray().size();
  if (common.format != Format::kTable) {
    json::Value document;
    document.Set("schemaVersion", "ravel/v1");
    document.Set("file", options.output);
    document.Set("ranks", static_cast<int64_t>(ranks));
    document.Set("events", static_cast<int64_t>(events));
    Print(FormatDocument(document, common.format));
    return kExitOk;
  }
  Print(absl::StrFormat("%s: %d ranks, %d events; open in Perfetto or chrome://tracing\n",
                        options.output,
                        ranks,
                        events));
  return kExitOk;
}

int RunTraceGantt(const CommonOptions& common, const TraceOptions& options) {
  const absl::StatusOr<json::Value> merged = LoadAll(options);
  if (!merged.ok()) {
    return Report(merged.status());
  }
  const absl::StatusOr<std::string> text = trace::TextGantt(*merged, options.step, options.width);
  if (!text.ok()) {
    return Report(text.status());
  }
  if (common.format != Format::kTable) {
    json::Value document;
    document.Set("schemaVersion", "ravel/v1");
    document.Set("text", *text);
    Print(FormatDocument(document, common.format));
    return kExitOk;
  }
  Print(*text);
  return kExitOk;
}

int RunTraceStalls(const CommonOptions& common, const TraceOptions& options) {
  const absl::StatusOr<json::Value> merged = LoadAll(options);
  if (!merged.ok()) {
    return Report(merged.status());
  }
  const std::vector<trace::Stall> stalls =
      trace::FindStalls(*merged, options.step, options.least_share);
  if (common.format != Format::kTable) {
    json::Array items;
    for (const trace::Stall& stall : stalls) {
      json::Value item;
      item.Set("rank", stall.rank).Set("instruction", stall.instruction);
      item.Set("seconds", stall.seconds).Set("share", stall.share);
      items.push_back(std::move(item));
    }
    Print(FormatDocument(ListDocument(std::move(items)), common.format));
    return kExitOk;
  }
  Table table({"RANK", "WAITING INSTRUCTION", "MS", "OF STEP"});
  for (const trace::Stall& stall : stalls) {
    table.AddRow({absl::StrCat(stall.rank),
                  stall.instruction,
                  absl::StrFormat("%.3f", stall.seconds * 1e3),
                  absl::StrFormat("%.1f%%", stall.share * 100)});
  }
  Print(table.empty()
            ? absl::StrFormat("no wait over %g%% of the step\n", options.least_share * 100)
            : table.Text(!common.no_headers));
  return kExitOk;
}

}  // namespace ravel::ctl
