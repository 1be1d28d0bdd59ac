// Threads that wait for disks: more of them than processors, so that many requests are in flight.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

class IoThreads {
 public:
  explicit IoThreads(int64_t num) {
    for (int64_t i = 0; i < num; ++i) threads_.emplace_back([this] { serve(); });
  }

  ~IoThreads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs work(0) to work(n - 1) on all threads, this one included; returns when all have ended. One caller at a time.
  void run(int64_t n, const std::function<void(int64_t)>& work) {
    if (!n) return;
    if (n == 1 || threads_.empty()) {
      for (int64_t i = 0; i < n; ++i) work(i);
      return;
    }
    const std::lock_guard<std::mutex> one_caller(callers_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work, size_ = n, next_ = 0, busy_ = int64_t(threads_.size());
      ++round_;
    }
    wake_.notify_all();
    take();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return !busy_; });
  }

 private:
  void take() {
    for (int64_t i = next_++; i < size_; i = next_++) (*work_)(i);
  }

  void serve() {
    int64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return ends_ || round_ != seen; });
      if (ends_) return;
      seen = round_;
      lock.unlock();
      take();
      lock.lock();
      if (!--busy_) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t)>* work_ = nullptr;
  int64_t size_ = 0, busy_ = 0, round_ = 0;
  std::atomic<int64_t> next_{0};
  bool ends_ = false;
};
