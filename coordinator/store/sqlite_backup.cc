#include "coordinator/store/sqlite_backup.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <sqlite3.h>

#include "coordinator/store/sqlite_statement.h"

namespace ravel::coordinator {

absl::Status BackUpDatabase(const std::string& directory,
                            const std::string& name,
                            int64_t now_ms,
                            size_t keep) {
  const std::filesystem::path folder = directory + "/backup";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string part = absl::StrCat(folder.string(), "/", name, ".part");
  std::filesystem::remove(part, error);
  sqlite3* from = nullptr;
  sqlite3* to = nullptr;
  int result = sqlite3_open_v2(
      absl::StrCat(directory, "/", name, ".db").c_str(), &from, SQLITE_OPEN_READONLY, nullptr);
  if (result == SQLITE_OK) {
    result = sqlite3_open(part.c_str(), &to);
  }
  absl::Status status = SqliteStatus(result, to == nullptr ? from : to);
  if (status.ok()) {
    sqlite3_backup* backup = sqlite3_backup_init(to, "main", from, "main");
    result = backup == nullptr ? sqlite3_errcode(to) : sqlite3_backup_step(backup, -1);
    status = SqliteStatus(result, to);
    sqlite3_backup_finish(backup);
  }
  sqlite3_close(to);
  sqlite3_close(from);
  if (status.ok()) {
    // Identities, as the database itself.
    std::filesystem::permissions(
        part, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write, error);
    std::filesystem::rename(part, folder / absl::StrFormat("%s-%015d.db", name, now_ms), error);
    status = error ? absl::UnavailableError(error.message()) : status;
  }
  std::vector<std::filesystem::path> copies;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().filename().string().starts_with(name + "-")) {
      copies.push_back(entry.path());
    }
  }
  std::sort(copies.begin(), copies.end());
  for (size_t i = 0; i + keep < copies.size(); ++i) {
    std::filesystem::remove(copies[i], error);
  }
  return Annotate(status, folder.string());
}

}  // namespace ravel::coordinator
