// Verbs about recorded steps: merge, gantt, stalls, overlap, memory. Inputs are trace files or
// folders of them; of a folder only the newest epoch counts, since a job that was resized in
// between has more than one timeline. All numbers come from common/trace; this file finds inputs
// and prints.

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

constexpr char kTraceSuffix[] = ".trace.json";
constexpr char kMemorySuffix[] = ".memory.json";
constexpr int64_t kMostMemoryBytes = 1 << 20;

// "epoch-00002" of "epoch-00002-rank-00001.trace.json": what a job wrote before and after it was
// resized is not one timeline.
std::string EpochOf(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename().string();
  const size_t rank = name.find("-rank-");
  return rank == std::string::npos ? "" : name.substr(0, rank);
}

// Adds the files of a directory's newest epoch, sorted.
void AddNewest(std::vector<std::string> found, std::vector<std::string>& files) {
  std::sort(found.begin(), found.end());
  std::string newest;
  for (const std::string& path : found) {
    newest = std::max(newest, EpochOf(path));
  }
  for (std::string& path : found) {
    if (EpochOf(path) == newest) {
      files.push_back(std::move(path));
    }
  }
}

// Files as they are, directories as what they hold.
absl::StatusOr<std::vector<std::string>> FilesOf(const std::vector<std::string>& inputs,
                                                 const char* suffix) {
  std::vector<std::string> files;
  for (const std::string& input : inputs) {
    std::error_code error;
    if (!std::filesystem::is_directory(input, error)) {
      files.push_back(input);
      continue;
    }
    std::vector<std::string> found;
    for (std::filesystem::directory_iterator at(input, error), end; !error && at != end;
         at.increment(error)) {
      if (absl::EndsWith(at->path().string(), suffix)) {
        found.push_back(at->path().string());
      }
    }
    if (error) {
      return absl::InternalError(absl::StrCat(input, ": ", error.message()));
    }
    if (found.empty()) {
      return absl::NotFoundError(absl::StrCat(input, ": holds no *", suffix));
    }
    AddNewest(std::move(found), files);
  }
  return files;
}

absl::StatusOr<json::Value> LoadAll(const TraceOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(options.inputs, kTraceSuffix));
  return trace::MergeChromeTraces(files);
}

json::Value StallDocument(const std::vector<trace::Stall>& stalls,
                          const std::vector<trace::LateRank>& late) {
  json::Array items;
  for (const trace::Stall& stall : stalls) {
    json::Value item;
    item.Set("rank", stall.rank).Set("instruction", stall.instruction);
    item.Set("seconds", stall.seconds).Set("share", stall.share);
    if (stall.late_rank >= 0) {
      item.Set("lateRank", stall.late_rank).Set("lateInstruction", stall.late_instruction);
    }
    items.push_back(std::move(item));
  }
  json::Array ranks;
  for (const trace::LateRank& rank : late) {
    json::Value item;
    item.Set("rank", rank.rank).Set("seconds", rank.seconds);
    item.Set("instruction", rank.instruction);
    ranks.push_back(std::move(item));
  }
  json::Value document = ListDocument(std::move(items));
  document.Set("lateRanks", json::Value(std::move(ranks)));
  return document;
}

json::Value OverlapDocument(const std::vector<trace::StepOverlap>& overlaps) {
  json::Array items;
  for (const trace::StepOverlap& overlap : overlaps) {
    json::Value item;
    item.Set("rank", overlap.rank);
    item.Set("gathers", overlap.gathers).Set("hiddenGathers", overlap.hidden_gathers);
    item.Set("reduces", overlap.reduces).Set("hiddenReduces", overlap.hidden_reduces);
    item.Set("exposedSeconds", overlap.exposed_seconds);
    item.Set("exposedShare", overlap.exposed_share);
    item.Set("longestIssueSeconds", overlap.longest_issue_seconds);
    items.push_back(std::move(item));
  }
  return ListDocument(std::move(items));
}

std::string BytesCell(const json::Value& line, const char* name) {
  const json::Value* const bytes = line.Find(name);
  return bytes != nullptr && bytes->is_int() ? absl::StrCat(bytes->AsInt()) : "-";
}

// Rows of one rank's report: when, part, line.
void AddMemoryRows(const json::Value& report, Table& table) {
  const json::Value* const rank = report.Find("rank");
  const std::string of_rank = rank != nullptr && rank->is_int() ? absl::StrCat(rank->AsInt()) : "?";
  for (const char* when : {"start", "end"}) {
    for (const char* part : {"uses", "process"}) {
      const json::Value* const moment = report.Find(when);
      const json::Value* const lines = moment == nullptr ? nullptr : moment->Find(part);
      if (lines == nullptr || !lines->is_array()) {
        continue;
      }
      for (const json::Value& line : lines->AsArray()) {
        const json::Value* const what = line.Find("what");
        table.AddRow({of_rank,
                      when,
                      std::string(part) == "uses" ? "arena" : "process",
                      what != nullptr && what->is_string() ? what->AsString() : "?",
                      BytesCell(line, "plannedBytes"),
                      BytesCell(line, "measuredBytes")});
      }
    }
  }
}

absl::StatusOr<json::Array> LoadMemory(const std::vector<std::string>& inputs) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(inputs, kMemorySuffix));
  json::Array reports;
  for (const std::string& path : files) {
    ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMostMemoryBytes));
    absl::StatusOr<json::Value> report = json::Parse(text);
    if (!report.ok()) {
      return Annotate(report.status(), path);
    }
    if (report->Find("start") == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": expected the memory report of a rank (start)"));
    }
    reports.push_back(*std::move(report));
  }
  return reports;
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
  const std::vector<trace::LateRank> late = trace::FindLateRanks(*merged, options.step);
  if (common.format != Format::kTable) {
    Print(FormatDocument(StallDocument(stalls, late), common.format));
    return kExitOk;
  }
  Table table({"RANK", "WAITING INSTRUCTION", "MS", "OF STEP", "LATE RANK", "WHICH WAS IN"});
  for (const trace::Stall& stall : stalls) {
    table.AddRow({absl::StrCat(stall.rank),
                  stall.instruction,
                  absl::StrFormat("%.3f", stall.seconds * 1e3),
                  absl::StrFormat("%.1f%%", stall.share * 100),
                  stall.late_rank < 0 ? "-" : absl::StrCat(stall.late_rank),
                  stall.late_instruction.empty() ? "-" : stall.late_instruction});
  }
  Print(table.empty()
            ? absl::StrFormat("no wait over %g%% of the step\n", options.least_share * 100)
            : table.Text(!common.no_headers));
  for (const trace::LateRank& rank : late) {
    Print(absl::StrFormat("rank %d was waited for %.3f ms by all others, most in %s\n",
                          rank.rank,
                          rank.seconds * 1e3,
                          rank.instruction.empty() ? "nothing recorded" : rank.instruction));
  }
  return kExitOk;
}

int RunTraceOverlap(const CommonOptions& common, const TraceOptions& options) {
  const absl::StatusOr<json::Value> merged = LoadAll(options);
  if (!merged.ok()) {
    return Report(merged.status());
  }
  const std::vector<trace::StepOverlap> overlaps = trace::CountOverlaps(*merged, options.step);
  if (common.format != Format::kTable) {
    Print(FormatDocument(OverlapDocument(overlaps), common.format));
    return kExitOk;
  }
  Table table({"RANK", "GATHERS", "HIDDEN", "REDUCES", "HIDDEN", "EXPOSED MS", "OF STEP"});
  for (const trace::StepOverlap& overlap : overlaps) {
    table.AddRow({absl::StrCat(overlap.rank),
                  absl::StrCat(overlap.gathers),
                  absl::StrCat(overlap.hidden_gathers),
                  absl::StrCat(overlap.reduces),
                  absl::StrCat(overlap.hidden_reduces),
                  absl::StrFormat("%.3f", overlap.exposed_seconds * 1e3),
                  absl::StrFormat("%.1f%%", overlap.exposed_share * 100)});
  }
  Print(table.Text(!common.no_headers));
  return kExitOk;
}

int RunTraceMemory(const CommonOptions& common, const TraceOptions& options) {
  absl::StatusOr<json::Array> reports = LoadMemory(options.inputs);
  if (!reports.ok()) {
    return Report(reports.status());
  }
  if (common.format != Format::kTable) {
    Print(FormatDocument(ListDocument(*std::move(reports)), common.format));
    return kExitOk;
  }
  Table table({"RANK", "WHEN", "OF", "WHAT", "PLANNED", "MEASURED"});
  for (const json::Value& report : *reports) {
    AddMemoryRows(report, table);
  }
  Print(table.Text(!common.no_headers));
  return kExitOk;
}

}  // namespace ravel::ctl
