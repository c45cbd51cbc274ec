// Writes trainers' output to files per (attempt, rank), in parts of limited size. Daemons send
// lines again after a broken stream, so lines are numbered: known numbers are left out, a gap
// becomes a line that says how many are missing. A job above its limit loses its oldest parts
// first. Files are text with tabs, so they can be read without this program.

#include "coordinator/store/log_store.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <fcntl.h>
#include <unistd.h>

#include "coordinator/store/line_file.h"

namespace ravel::coordinator {
namespace {

std::string Format(const LogLine& line) {
  const std::string text = absl::StrReplaceAll(line.text, {{"\n", "\\n"}});
  return absl::StrCat(line.seq, "\t", line.time_ms, "\t", line.node, "\t", text, "\n");
}

bool ParseNumber(std::string_view text, int64_t& number) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end;
}

// The number in "attempt-3"; -1 for any other name.
int64_t NumberIn(std::string_view name, std::string_view prefix) {
  int64_t number = -1;
  return name.starts_with(prefix) && ParseNumber(name.substr(prefix.size()), number) ? number : -1;
}

// "rank-0.log" and "rank-0.3.log".
bool ParseName(std::string_view name, int64_t& rank, int64_t& part) {
  constexpr std::string_view kEnd = ".log";
  if (!name.ends_with(kEnd)) {
    return false;
  }
  name.remove_suffix(kEnd.size());
  const size_t dot = name.find('.');
  rank = NumberIn(name.substr(0, dot), "rank-");
  part = 0;
  return rank >= 0 && (dot == std::string_view::npos || ParseNumber(name.substr(dot + 1), part));
}

std::string PartName(int64_t rank, int64_t part) {
  return part == 0 ? absl::StrCat("rank-", rank, ".log")
                   : absl::StrCat("rank-", rank, ".", part, ".log");
}

}  // namespace

bool ParseLogLine(std::string_view stored, LogLine& line) {
  const size_t first = stored.find('\t');
  const size_t second = first == std::string_view::npos ? first : stored.find('\t', first + 1);
  const size_t third = second == std::string_view::npos ? second : stored.find('\t', second + 1);
  if (third == std::string_view::npos || !ParseNumber(stored.substr(0, first), line.seq) ||
      !ParseNumber(stored.substr(first + 1, second - first - 1), line.time_ms)) {
    return false;
  }
  if (line.seq < 0 || line.seq > kMaxLogSeq) {
    return false;
  }
  line.node = std::string(stored.substr(second + 1, third - second - 1));
  line.text = std::string(stored.substr(third + 1));
  return true;
}

std::vector<LogFile> ListLogFiles(const std::string& directory,
                                  const std::string& job_uid,
                                  int64_t attempt,
                                  int64_t rank) {
  std::vector<LogFile> files;
  std::error_code error;
  const std::filesystem::path root = std::filesystem::path(directory) / job_uid;
  for (const auto& folder : std::filesystem::directory_iterator(root, error)) {
    LogFile file;
    file.attempt = NumberIn(folder.path().filename().string(), "attempt-");
    if (file.attempt < 0 || (attempt != 0 && attempt != file.attempt)) {
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(folder.path(), error)) {
      if (ParseName(entry.path().filename().string(), file.rank, file.part) &&
          (rank < 0 || rank == file.rank)) {
        file.path = entry.path().string();
        file.bytes = FileSize(file.path);
        files.push_back(file);
      }
    }
  }
  std::sort(files.begin(), files.end(), [](const LogFile& a, const LogFile& b) {
    return std::tie(a.attempt, a.rank, a.part) < std::tie(b.attempt, b.rank, b.part);
  });
  return files;
}

LogStore::LogStore(std::string directory, LogLimits limits)
    : directory_(std::move(directory)), limits_(limits) {}

LogStore::~LogStore() {
  for (const auto& [key, source] : sources_) {
    if (source.file >= 0) {
      close(source.file);
    }
  }
}

absl::StatusOr<LogStore::Source*> LogStore::Find(const std::string& job_uid,
                                                 int64_t attempt,
                                                 int64_t rank) {
  const std::string folder = absl::StrCat(directory_, "/", job_uid, "/attempt-", attempt);
  const auto [found, fresh] = sources_.try_emplace(absl::StrCat(folder, "/", rank));
  Source& source = found->second;
  if (!fresh) {
    return &source;
  }
  if (!job_bytes_.contains(job_uid)) {  // what earlier coordinators wrote counts
    int64_t& bytes = job_bytes_[job_uid];
    for (const LogFile& file : ListLogFiles(directory_, job_uid, 0, -1)) {
      bytes += file.bytes;
    }
  }
  source.job_uid = job_uid;
  source.folder = folder;
  source.rank = rank;
  const std::vector<LogFile> parts = ListLogFiles(directory_, job_uid, attempt, rank);
  if (!parts.empty()) {
    source.part = parts.back().part;
    source.part_bytes = parts.back().bytes;
    // A daemon sends again what it does not know to be stored.
    const std::string& path = parts.back().path;
    ASSIGN_OR_RETURN(const int64_t begin, OffsetOfLastLines(path, source.part_bytes, 2));
    const auto note = [&source](std::string_view stored, int64_t) {
      LogLine line;
      if (ParseLogLine(stored, line)) {
        source.next_seq = std::max(source.next_seq, line.seq + 1);
      }
      return true;
    };
    RETURN_IF_ERROR(ReadLines(path, begin, source.part_bytes, source.part_bytes, note).status());
  }
  return &source;
}

absl::Status LogStore::Open(Source& source) {
  source.used = ++appends_;
  if (source.file >= 0) {
    return absl::OkStatus();
  }
  int64_t open_files = 0;
  Source* oldest = nullptr;
  for (auto& [key, other] : sources_) {
    if (other.file >= 0) {
      ++open_files;
      oldest = oldest == nullptr || other.used < oldest->used ? &other : oldest;
    }
  }
  if (open_files >= static_cast<int64_t>(kMaxOpen)) {
    close(std::exchange(oldest->file, -1));
  }
  std::error_code error;
  std::filesystem::create_directories(source.folder, error);
  const std::string path = absl::StrCat(source.folder, "/", PartName(source.rank, source.part));
  source.file = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
  if (source.file < 0) {
    return ErrnoStatus(errno, path);
  }
  char last = '\n';
  source.part_bytes = FileSize(path);
  if (source.part_bytes > 0 && pread(source.file, &last, 1, source.part_bytes - 1) == 1 &&
      last != '\n') {
    return Write(source, "\n");  // the line that a crash tore stays torn, and alone
  }
  return absl::OkStatus();
}

absl::Status LogStore::Write(Source& source, const std::string& text) {
  const ssize_t written = write(source.file, text.data(), text.size());
  if (written > 0) {
    source.part_bytes += written;
    job_bytes_[source.job_uid] += written;
  }
  if (written == static_cast<ssize_t>(text.size())) {
    return absl::OkStatus();
  }
  const absl::Status status =
      written < 0 ? ErrnoStatus(errno, source.folder)
                  : absl::ResourceExhaustedError(absl::StrCat(source.folder, ": short write"));
  close(std::exchange(source.file, -1));
  return status;
}

bool LogStore::DropOldest(const std::string& job_uid, const std::string& kept) {
  bool dropped = false;
  int64_t& bytes = job_bytes_[job_uid];
  if (bytes <= limits_.job_bytes) {
    return false;
  }
  std::vector<LogFile> files = ListLogFiles(directory_, job_uid, 0, -1);
  std::stable_sort(files.begin(), files.end(), [](const LogFile& a, const LogFile& b) {
    return std::tie(a.attempt, a.part) < std::tie(b.attempt, b.part);
  });
  for (const LogFile& file : files) {
    if (bytes <= limits_.job_bytes || file.path == kept) {
      continue;
    }
    if (unlink(file.path.c_str()) == 0) {
      bytes -= file.bytes;
      dropped = true;
      const auto source = sources_.find(
          absl::StrCat(directory_, "/", job_uid, "/attempt-", file.attempt, "/", file.rank));
      if (source != sources_.end() && source->second.part == file.part &&
          source->second.file >= 0) {
        close(std::exchange(source->second.file, -1));
      }
    }
  }
  return dropped;
}

absl::StatusOr<std::vector<LogLine>> LogStore::Append(const std::string& job_uid,
                                                      std::vector<LogLine> lines) {
  std::vector<LogLine> fresh;
  if (lines.empty()) {
    return fresh;
  }
  ASSIGN_OR_RETURN(Source* const source, Find(job_uid, lines.front().attempt, lines.front().rank));
  if (lines.back().seq < source->next_seq) {
    return fresh;
  }
  if (source->part_bytes >= limits_.part_bytes) {
    if (source->file >= 0) {
      close(std::exchange(source->file, -1));
    }
    ++source->part;
    source->part_bytes = 0;
  }
  RETURN_IF_ERROR(Open(*source));
  std::string text;
  const auto add = [&text, &fresh](LogLine line) {
    text += Format(line);
    fresh.push_back(std::move(line));
  };
  const std::string path = absl::StrCat(source->folder, "/", PartName(source->rank, source->part));
  if (DropOldest(job_uid, path)) {
    LogLine told = lines.front();
    told.text = absl::StrCat("[the oldest lines were dropped: the job's logs are kept up to ",
                             limits_.job_bytes >> 20,
                             " MiB]");
    told.seq = std::max<int64_t>(source->next_seq - 1, 0);
    add(std::move(told));
  }
  int64_t next_seq = source->next_seq;
  for (LogLine& line : lines) {
    if (line.seq < next_seq) {
      continue;
    }
    if (line.seq > next_seq && next_seq > 0) {
      LogLine gap = line;
      gap.text = absl::StrCat("[", line.seq - next_seq, " lines were lost]");
      gap.seq = line.seq - 1;
      add(std::move(gap));
    }
    next_seq = line.seq + 1;
    add(std::move(line));
  }
  RETURN_IF_ERROR(Write(*source, text));
  source->next_seq = next_seq;
  return fresh;
}

std::vector<LogLine> LogStore::Read(const std::string& job_uid,
                                    int64_t attempt,
                                    int64_t rank) const {
  std::vector<LogLine> lines;
  for (const LogFile& file : ListLogFiles(directory_, job_uid, attempt, rank)) {
    ReadLines(file.path, 0, file.bytes, file.bytes, [&](std::string_view stored, int64_t) {
      LogLine line;
      line.attempt = file.attempt;
      line.rank = file.rank;
      if (ParseLogLine(stored, line)) {
        lines.push_back(std::move(line));
      }
      return true;
    }).IgnoreError();
  }
  std::stable_sort(lines.begin(), lines.end(), [](const LogLine& a, const LogLine& b) {
    return std::tie(a.attempt, a.time_ms, a.rank, a.seq) <
           std::tie(b.attempt, b.time_ms, b.rank, b.seq);
  });
  return lines;
}

void LogStore::Close(const std::string& job_uid) {
  for (auto source = sources_.begin(); source != sources_.end();) {
    if (source->second.job_uid != job_uid) {
      ++source;
      continue;
    }
    if (source->second.file >= 0) {
      close(source->second.file);
    }
    source = sources_.erase(source);
  }
  job_bytes_.erase(job_uid);
}

void LogStore::Remove(const std::string& job_uid) {
  Close(job_uid);
  std::error_code ignored;  // what stays is in nobody's way: uids are never reused
  std::filesystem::remove_all(absl::StrCat(directory_, "/", job_uid), ignored);
}

}  // namespace ravel::coordinator
