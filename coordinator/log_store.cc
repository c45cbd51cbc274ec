#include "coordinator/log_store.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <tuple>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

namespace ravel::coordinator {
namespace {

std::string Format(const LogLine& line) {
  const std::string text = absl::StrReplaceAll(line.text, {{"\n", "\\n"}});
  return absl::StrCat(line.seq, "\t", line.time_ms, "\t", line.node, "\t", text, "\n");
}

bool Parse(const std::string& stored, LogLine& line) {
  const size_t first = stored.find('\t');
  const size_t second = first == std::string::npos ? first : stored.find('\t', first + 1);
  const size_t third = second == std::string::npos ? second : stored.find('\t', second + 1);
  if (third == std::string::npos || !absl::SimpleAtoi(stored.substr(0, first), &line.seq) ||
      !absl::SimpleAtoi(stored.substr(first + 1, second - first - 1), &line.time_ms)) {
    return false;
  }
  line.node = stored.substr(second + 1, third - second - 1);
  line.text = stored.substr(third + 1);
  return true;
}

// The number in "attempt-3" or "rank-0.log"; -1 for any other name.
int64_t NumberIn(const std::string& name, const std::string& prefix, const std::string& suffix) {
  int64_t number = -1;
  const bool named = name.starts_with(prefix) && name.ends_with(suffix) &&
                     name.size() > prefix.size() + suffix.size();
  const std::string inner =
      named ? name.substr(prefix.size(), name.size() - prefix.size() - suffix.size()) : "";
  return named && absl::SimpleAtoi(inner, &number) ? number : -1;
}

void ReadFileLines(const std::filesystem::path& path,
                   int64_t attempt,
                   int64_t rank,
                   std::vector<LogLine>& lines) {
  std::ifstream input(path);
  std::string stored;
  while (std::getline(input, stored)) {
    LogLine line;
    line.attempt = attempt;
    line.rank = rank;
    if (Parse(stored, line)) {
      lines.push_back(std::move(line));
    }
  }
}

}  // namespace

LogStore::LogStore(std::string directory) : directory_(std::move(directory)) {}

std::string LogStore::PathOf(const std::string& job_uid, int64_t attempt, int64_t rank) const {
  return absl::StrCat(directory_, "/", job_uid, "/attempt-", attempt, "/rank-", rank, ".log");
}

absl::StatusOr<std::vector<LogLine>> LogStore::Append(const std::string& job_uid,
                                                      std::vector<LogLine> lines) {
  std::vector<LogLine> fresh;
  if (lines.empty() || job_bytes_[job_uid] > kMaxJobBytes) {
    return fresh;
  }
  const std::string path = PathOf(job_uid, lines.front().attempt, lines.front().rank);
  Source& source = sources_[path];
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  std::ofstream output(path, std::ios::app);
  for (LogLine& line : lines) {
    if (line.seq < source.next_seq) {
      continue;
    }
    if (line.seq > source.next_seq && source.next_seq > 0) {
      LogLine gap = line;
      gap.text = absl::StrCat("[", line.seq - source.next_seq, " lines were lost]");
      gap.seq = line.seq - 1;
      output << Format(gap);
      fresh.push_back(std::move(gap));
    }
    source.next_seq = line.seq + 1;
    const std::string stored = Format(line);
    job_bytes_[job_uid] += static_cast<int64_t>(stored.size());
    output << stored;
    fresh.push_back(std::move(line));
  }
  if (job_bytes_[job_uid] > kMaxJobBytes) {
    output << Format({source.next_seq,
                      fresh.back().time_ms,
                      0,
                      0,
                      fresh.back().node,
                      "[the job's log limit is reached; later lines are kept on the nodes only]"});
  }
  output.flush();
  if (!output) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": cannot be written"));
  }
  return fresh;
}

std::vector<LogLine> LogStore::Read(const std::string& job_uid,
                                    int64_t attempt,
                                    int64_t rank) const {
  std::vector<LogLine> lines;
  std::error_code error;
  const std::filesystem::path root = std::filesystem::path(directory_) / job_uid;
  for (const auto& folder : std::filesystem::directory_iterator(root, error)) {
    const int64_t found_attempt = NumberIn(folder.path().filename().string(), "attempt-", "");
    if (found_attempt < 0 || (attempt != 0 && attempt != found_attempt)) {
      continue;
    }
    for (const auto& file : std::filesystem::directory_iterator(folder.path(), error)) {
      const int64_t found_rank = NumberIn(file.path().filename().string(), "rank-", ".log");
      if (found_rank >= 0 && (rank < 0 || rank == found_rank)) {
        ReadFileLines(file.path(), found_attempt, found_rank, lines);
      }
    }
  }
  std::stable_sort(lines.begin(), lines.end(), [](const LogLine& a, const LogLine& b) {
    return std::tie(a.attempt, a.time_ms, a.rank, a.seq) <
           std::tie(b.attempt, b.time_ms, b.rank, b.seq);
  });
  return lines;
}

void LogStore::Remove(const std::string& job_uid) {
  job_bytes_.erase(job_uid);
  const std::string folder = absl::StrCat(directory_, "/", job_uid);
  std::erase_if(sources_, [&](const auto& item) { return item.first.starts_with(folder + "/"); });
  std::error_code ignored;  // what stays is in nobody's way: uids are never reused
  std::filesystem::remove_all(folder, ignored);
}

}  // namespace ravel::coordinator
