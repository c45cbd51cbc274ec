#pragma once

// One file of a store while it is written, in a part beside its name.

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"
#include "common/store/file_store.h"
#include "worker/store/upload_book.h"

namespace ravel::store_server {

inline constexpr std::string_view kPartEnding = ".part";
// Most bytes of one block that clients send.
inline constexpr int64_t kUploadBlockBytes = 2 << 20;

// crc32c of bytes [0, end).
absl::StatusOr<uint32_t> ChecksumOfFile(const store::FileReader& reader, int64_t end);

// Blocks are gathered in one of two buffers, while a thread of its own writes the other one. Used
// from one thread at a time. Destroyed before Finish, it leaves its part, with which another upload
// of the same id can go on.
class Upload {
 public:
  // Goes on with `part` at `offset`, which is cut off there; both are full paths. OutOfRange beyond
  // what is written of it. ResourceExhausted when `expected_bytes` of the whole file do not fit.
  static absl::StatusOr<std::unique_ptr<Upload>> Open(
      UploadBook* book, std::string part, std::string path, int64_t offset, int64_t expected_bytes);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Bytes of the file so far.
  int64_t appended() const { return written_ + in_flight_ + pending_; }
  // Those that the part has: a process that is killed does not lose them.
  int64_t written() const { return written_; }

  // Memory for the next block, of 1 byte to 8 MiB; good until the next call.
  // ResourceExhausted above the quota. After an error of any call the upload is only good for being
  // destroyed: its part holds what was written.
  absl::StatusOr<std::span<char>> Room(int64_t bytes);
  // Takes the block that Room's memory was filled with, all of it.
  void Take(int64_t bytes, uint32_t crc32c);
  // Room, a copy, Take.
  absl::Status Append(std::string_view data, uint32_t crc32c);
  // A block more would be written together with those before; else Start comes first.
  bool MayTakeMore() const;
  // Begins to write what was appended, once what was begun before is written.
  absl::Status Start();
  // Waits until what was begun is written.
  absl::Status Settle();
  // Start and Settle.
  absl::Status Flush();
  // Durable, under its name. DataLoss, and the part is gone, unless the whole file has this size
  // and crc32c; AlreadyExists when the name is taken.
  absl::Status Finish(int64_t size, uint32_t crc32c);

 private:
  Upload(UploadBook* book, std::string part, std::string path)
      : book_(book), part_(std::move(part)), path_(std::move(path)) {}
  absl::Status OpenFile();
  absl::Status OpenPart(int64_t offset, int64_t expected_bytes);
  absl::Status ReadChecksum(int64_t offset);

  // The thread runs it: it writes what Start hands over.
  void WriteInTurn();
  // Writes all of `data` at `offset`; the bytes that went past the page cache.
  absl::StatusOr<int64_t> Put(std::string_view data, int64_t offset);
  absl::StatusOr<int64_t> PutDirect(std::string_view data, int64_t offset);

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  using Buffer = std::unique_ptr<char, Free>;

  UploadBook* const book_;
  const std::string part_;
  const std::string path_;
  int fd_ = -1;
  bool counted_ = false;  // the book knows that fd_ is written
  int direct_fd_ = -1;    // of the same part, past the page cache; -1: the file system has none.
                          // Between Start and Settle the thread's
  std::array<Buffer, 2> buffers_;
  size_t filling_ = 0;     // the buffer that blocks go to
  int64_t pending_ = 0;    // bytes in it
  int64_t in_flight_ = 0;  // bytes of the other one, which the thread writes
  int64_t written_ = 0;    // bytes of the part
  int64_t reserved_ = 0;   // of the quota, beyond what is written
  int64_t started_ = 0;    // bytes whose way to the disk was begun
  uint32_t crc_ = 0;       // of all that was appended
  bool spent_ = false;     // failed or finished: crc_ is not that of a part

  Mutex mutex_;
  CondVar changed_;
  std::string_view job_ ABSL_GUARDED_BY(mutex_);  // empty: none
  int64_t job_offset_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::StatusOr<int64_t> result_ ABSL_GUARDED_BY(mutex_) = 0;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // begins with the first job
};

}  // namespace ravel::store_server
