// Rows in files: a log to which written rows are appended, for tables larger than memory.
//
// A record is a row's number and its bytes; several share a page, of 4 KiB or the least multiple that holds a record. A
// page begins with a checksum of the rest, and is written once. Pages are appended to segments, files of equal size; an
// index in memory has the record of each row, four bytes. Rows that were never written have none. A segment without
// live records is deleted; `compact` copies live records out of segments that have few.
//
// A snapshot keeps its records readable, from another thread too, until it is released.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "page_reads.h"
#include "row_log.h"

namespace {

class RowLog;

// Rows of one page.
struct PageRows {
  const Wanted *begin, *end;
};

// What is to be read of a log, and the tensors to which it is copied.
struct PagesToRead {
  RowLog* log;
  std::vector<Wanted> rows;
  std::vector<PageRows> pages;
  const RowPart* parts;
  int64_t num_parts;
};

class RowLog {
 public:
  // `direct`: reads and writes bypass the page cache.
  RowLog(std::string folder, int64_t num_rows, int64_t row_bytes, int64_t segment_bytes,
         std::shared_ptr<PageReaders> readers, bool direct)
      : folder_(std::move(folder)),
        page_bytes_((int64_t(sizeof(PageHeader)) + kRowBytes + row_bytes + kPage - 1) / kPage * kPage),
        record_bytes_(kRowBytes + row_bytes),
        page_records_((page_bytes_ - int64_t(sizeof(PageHeader))) / record_bytes_),
        buffer_pages_(std::max<int64_t>(1, kBufferBytes / page_bytes_)),
        segment_pages_(std::max<int64_t>(1, segment_bytes / page_bytes_ / buffer_pages_) * buffer_pages_),
        direct_(direct),
        record_of_(num_rows, kNever),
        buffer_(pages_of(buffer_pages_ * page_bytes_)),
        buffer_begin_(-buffer_pages_),
        readers_(std::move(readers)) {}

  ~RowLog() {
    for (const LogSegment& segment : segments_)
      if (segment.file >= 0) close(segment.file);
  }

  // Finds rows to be copied to `lines` of the parts, and copies those that are not in files yet. Positions of rows that
  // were never written go to `never`, their number to `num_never`. Returns false after an error.
  bool begin_read(const int64_t* rows, const int64_t* lines, int64_t n, const RowPart* parts, int64_t num_parts,
                  int64_t* never, int64_t* num_never, PagesToRead& out) {
    std::vector<Wanted> wanted;
    *num_never = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t record = record_of_[rows[i]];
      if (record == kNever)
        never[(*num_never)++] = i;
      else
        wanted.push_back({record, rows[i], lines[i]});
    }
    return find_pages(std::move(wanted), parts, num_parts, true, out);
  }

  // Reads pages of several logs.
  static bool end_read(PageReader& reader, const std::vector<PagesToRead>& logs) {
    std::vector<std::pair<const PagesToRead*, PageRows>> pages;
    int64_t largest = 0;
    for (const PagesToRead& own : logs) {
      largest = std::max(largest, own.log->page_bytes_);
      for (const PageRows& page : own.pages) pages.push_back({&own, page});
    }
    return reader.read(
        pages.size(), largest,
        [&](int64_t i) { return pages[i].first->log->place_of(pages[i].first->log->page_of(pages[i].second.begin->record)); },
        [&](int64_t i, const char* bytes, int64_t read) {
          const auto& [own, rows] = pages[i];
          return own->log->check_page(own->log->page_of(rows.begin->record), bytes, read) &&
                 own->log->copy_rows(rows.begin, rows.end, bytes, own->parts, own->num_parts);
        });
  }

  PageReader& reader() { return readers_->of_rows(); }

  // Appends `lines` of the parts as rows. Returns false after an error.
  bool write(const int64_t* rows, const int64_t* lines, int64_t n, const RowPart* parts, int64_t num_parts) {
    for (int64_t i = 0; i < n; ++i) {
      char* bytes = append(rows[i]);
      if (!bytes) return false;
      for (int64_t part = 0; part < num_parts; bytes += parts[part++].bytes)
        std::memcpy(bytes, parts[part].memory + lines[i] * parts[part].bytes, parts[part].bytes);
    }
    return true;
  }

  // Copies live records out of segments of which more than `share` are dead, at most `max` segments; not out of those
  // that a snapshot needs. Returns false after an error.
  bool compact(double share, int64_t max) {
    for (int64_t done = 0; done < max; ++done) {
      const int64_t victim = find_victim(share);
      if (victim < 0) break;
      if (!copy_live(victim)) return false;
    }
    return true;
  }

  // Makes what was written so far durable and keeps it. Returns the snapshot's number, or -1 after an error.
  int64_t take_snapshot() {
    if (!flush()) return -1;
    if (!synchronize()) return -1;
    const std::lock_guard<std::mutex> lock(mutex_);
    Snapshot& taken = snapshots_[++last_snapshot_];
    taken.record_of = record_of_;
    for (int64_t s = 0; s < int64_t(segments_.size()); ++s)
      if (segments_[s].file >= 0) ++segments_[s].snapshots, taken.segments.push_back(s);
    return last_snapshot_;
  }

  void release_snapshot(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto taken = snapshots_.find(number);
    if (taken == snapshots_.end()) return;
    for (const int64_t s : taken->second.segments) {
      --segments_[s].snapshots;
      drop_if_dead(s);
    }
    snapshots_.erase(taken);
  }

  // Copies n rows from `first` on, as they were at the snapshot, to lines 0 to n - 1; returns the number of those never
  // written, or -1 after an error. May run beside all others.
  int64_t read_snapshot(int64_t number, int64_t first, int64_t n, const RowPart* parts, int64_t num_parts,
                        int64_t* never) {
    std::vector<Wanted> wanted;
    int64_t num_never = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const std::vector<uint32_t>& record_of = snapshots_.at(number).record_of;
      for (int64_t i = 0; i < n; ++i) {
        if (record_of[first + i] == kNever)
          never[num_never++] = i;
        else
          wanted.push_back({record_of[first + i], first + i, i});
      }
    }
    std::vector<PagesToRead> own(1);
    const bool good = find_pages(std::move(wanted), parts, num_parts, false, own[0]);
    return good && end_read(readers_->of_snapshots(), own) ? num_never : -1;
  }

  void numbers(int64_t* out) const {
    out[0] = bytes_read_, out[1] = bytes_written_, out[2] = live_, out[3] = records_ - live_;
    out[4] = readers_->of_rows().by_ring();
  }

  std::string error() {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    return error_;
  }

 private:
  struct Snapshot {
    std::vector<uint32_t> record_of;
    std::vector<int64_t> segments;
  };

  int64_t page_of(uint32_t record) const { return record / page_records_; }
  template <class Byte>
  Byte* bytes_of(Byte* page, uint32_t record) const {
    return page + sizeof(PageHeader) + record % page_records_ * record_bytes_;
  }
  int64_t segment_of(uint32_t record) const { return page_of(record) / segment_pages_; }

  // The segment with fewest live records, of those of which more than `share` are dead; -1 without one.
  int64_t find_victim(double share) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t victim = -1;
    for (int64_t s = 0; s < int64_t(segments_.size()); ++s) {
      const LogSegment& segment = segments_[s];
      const bool may = segment.file >= 0 && s != current_ && !segment.snapshots;
      if (!may || segment.live >= (1 - share) * segment.records) continue;
      if (victim < 0 || segment.live < segments_[victim].live) victim = s;
    }
    return victim;
  }

  // The pages of rows, in order, each once. `buffered`: some may not be written yet; their rows are copied at once.
  bool find_pages(std::vector<Wanted> wanted, const RowPart* parts, int64_t num_parts, bool buffered,
                  PagesToRead& out) {
    std::sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) { return a.record < b.record; });
    out = {this, std::move(wanted), {}, parts, num_parts};
    const Wanted* const end = out.rows.data() + out.rows.size();
    for (const Wanted *begin = out.rows.data(), *next = begin; begin < end; begin = next) {
      const int64_t page = page_of(begin->record);
      while (next < end && page_of(next->record) == page) ++next;
      if (!buffered || page < buffer_begin_ || page >= buffer_begin_ + buffer_pages_)
        out.pages.push_back({begin, next});
      else if (!copy_rows(begin, next, buffer_.get() + (page - buffer_begin_) * page_bytes_, parts, num_parts))
        return false;
    }
    return true;
  }

  // Copies rows out of the bytes of their page.
  bool copy_rows(const Wanted* begin, const Wanted* end, const char* bytes, const RowPart* parts, int64_t num_parts) {
    for (const Wanted* one = begin; one < end; ++one) {
      const char* from = bytes_of(bytes, one->record);
      int64_t row;
      std::memcpy(&row, from, kRowBytes);
      if (row != one->row)
        return fail(name_of(page_of(one->record)) + ": row " + std::to_string(row) + " in place of " +
                    std::to_string(one->row));
      from += kRowBytes;
      for (int64_t part = 0; part < num_parts; from += parts[part++].bytes)
        std::memcpy(parts[part].memory + one->line * parts[part].bytes, from, parts[part].bytes);
    }
    return true;
  }

  PagePlace place_of(int64_t page) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {segments_[page / segment_pages_].file, page % segment_pages_ * page_bytes_, page_bytes_};
  }

  // Whether a page is as it was written; `read`: the number of its bytes, or the negative error number.
  bool check_page(int64_t page, const char* bytes, int64_t read) {
    if (read < 0) return errno = int(-read), fail_errno("read", page / segment_pages_);
    bytes_read_ += page_bytes_;
    if (read < page_bytes_ || !is_intact(bytes, page_bytes_, page))
      return fail(name_of(page) + " is damaged: " + (read < page_bytes_ ? "it ends early" : "its checksum is wrong"));
    return true;
  }

  // The memory of a row's new record; null after an error.
  char* append(int64_t row) {
    if (buffer_records_ == buffer_pages_ * page_records_ && !flush()) return nullptr;
    if (current_ < 0 && !begin_segment()) return nullptr;
    const uint32_t record = buffer_begin_ * page_records_ + buffer_records_++;
    char* bytes = bytes_of(buffer_.get() + (page_of(record) - buffer_begin_) * page_bytes_, record);
    std::memcpy(bytes, &row, kRowBytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    ++records_, ++live_;
    ++segments_[current_].records, ++segments_[current_].live;
    if (record_of_[row] != kNever) {
      const int64_t old = segment_of(record_of_[row]);
      --live_, --segments_[old].live;
      drop_if_dead(old);
    }
    record_of_[row] = record;
    return bytes + kRowBytes;
  }

  // Writes the pages of the buffer; what follows begins on a new page.
  bool flush() {
    const int64_t pages = (buffer_records_ + page_records_ - 1) / page_records_;
    if (!pages) return true;
    for (int64_t i = 0; i < pages; ++i) {
      const int64_t records = std::min(page_records_, buffer_records_ - i * page_records_);
      seal_page(buffer_.get() + i * page_bytes_, page_bytes_, records, buffer_begin_ + i);
    }
    const int64_t begin = buffer_begin_ % segment_pages_;
    for (int64_t done = 0; done < pages * page_bytes_;) {
      const int64_t rest = pages * page_bytes_ - done, at = begin * page_bytes_ + done;
      const int64_t wrote = pwrite(segments_[current_].file, buffer_.get() + done, rest, at);
      if (wrote <= 0) return fail_errno("write", current_);
      done += wrote;
      bytes_written_ += wrote;
    }
    buffer_begin_ += pages, buffer_records_ = 0;
    if (begin + pages + buffer_pages_ > segment_pages_) current_ = -1, buffer_begin_ = -buffer_pages_;
    return true;
  }

  // Makes all files durable. A file that another thread removes meanwhile is no longer needed: duplicates stay valid.
  bool synchronize() {
    std::vector<int> files;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const LogSegment& segment : segments_)
        if (segment.file >= 0) files.push_back(fcntl(segment.file, F_DUPFD_CLOEXEC, 0));
    }
    bool good = true;
    for (const int file : files) {
      if (file < 0 || fdatasync(file)) good = good && fail(folder_ + ": cannot synchronize: " + std::strerror(errno));
      if (file >= 0) close(file);
    }
    return good;
  }

  bool begin_segment() {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t s = 0;
    while (s < int64_t(segments_.size()) && segments_[s].file >= 0) ++s;
    if ((s + 1) * segment_pages_ * page_records_ >= int64_t(kNever)) return fail(folder_ + " has 4 billion records");
    if (s == int64_t(segments_.size())) segments_.emplace_back();
    segments_[s] = {};
    segments_[s].name = ++last_name_;
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | (direct_ ? O_DIRECT : 0);
    segments_[s].file = open(path_of(s).c_str(), flags, 0644);
    if (segments_[s].file < 0) return fail_errno("create", s);
    current_ = s, buffer_begin_ = s * segment_pages_;
    return true;
  }

  void drop_if_dead(int64_t s) {
    LogSegment& segment = segments_[s];
    if (s == current_ || segment.file < 0 || segment.live || segment.snapshots) return;
    close(segment.file);
    unlink(path_of(s).c_str());
    records_ -= segment.records;
    segment = {};
  }

  // Appends the live records of a full segment again; it is deleted, or once no snapshot needs it.
  bool copy_live(int64_t s) {
    const Pages memory = pages_of(page_bytes_);
    for (int64_t page = s * segment_pages_; page < (s + 1) * segment_pages_ && segments_[s].live; ++page) {
      const PagePlace at = place_of(page);
      const int64_t read = pread(at.file, memory.get(), page_bytes_, at.offset);
      if (!check_page(page, memory.get(), read < 0 ? -errno : read)) return false;
      for (uint32_t i = 0; i < header_of(memory.get()).records; ++i) {
        const char* bytes = bytes_of(memory.get(), page * page_records_ + i);
        int64_t row;
        std::memcpy(&row, bytes, kRowBytes);
        if (record_of_[row] != page * page_records_ + i) continue;
        char* copy = append(row);
        if (!copy) return false;
        std::memcpy(copy, bytes + kRowBytes, record_bytes_ - kRowBytes);
      }
    }
    return true;
  }

  std::string path_of(int64_t s) const { return folder_ + "/segment-" + std::to_string(segments_[s].name); }
  std::string name_of(int64_t page) const {
    return path_of(page / segment_pages_) + ", page " + std::to_string(page % segment_pages_);
  }
  bool fail(const std::string& text) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (error_.empty()) error_ = text;
    return false;
  }
  bool fail_errno(const char* what, int64_t s) {
    const int number = errno;
    return fail("cannot " + std::string(what) + " " + path_of(s) + ": " + std::strerror(number));
  }

  const std::string folder_;
  const int64_t page_bytes_, record_bytes_, page_records_, buffer_pages_, segment_pages_;
  const bool direct_;
  std::vector<uint32_t> record_of_;
  std::vector<LogSegment> segments_;
  std::map<int64_t, Snapshot> snapshots_;
  int64_t current_ = -1, last_snapshot_ = 0, records_ = 0, live_ = 0;
  uint64_t last_name_ = 0;
  // Pages that are not written yet: from page `buffer_begin_` on, with `buffer_records_` records.
  Pages buffer_;
  int64_t buffer_begin_, buffer_records_ = 0;
  std::atomic<int64_t> bytes_read_{0}, bytes_written_{0};
  std::mutex mutex_, error_mutex_;  // of segments and snapshots; of the error
  std::string error_;
  const std::shared_ptr<PageReaders> readers_;
};

}  // namespace
