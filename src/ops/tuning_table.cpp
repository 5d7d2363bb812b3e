#include "ops/tuning_table.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>

#include "rowan/ops/tuning.h"

namespace rowan {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kHeader = "rowan tuning 1";
constexpr std::string_view kEquals = " = ";
constexpr std::uintmax_t kMostFileBytes = 4u << 20;  ///< holds kMostChoices lines of the longest keys

/// Printable characters but '=', which ends a key.
bool valid_key(std::string_view key) {
  return !key.empty() && key.size() <= TuningTable::kMostKeyBytes && key.front() != ' ' && key.back() != ' ' &&
         std::all_of(key.begin(), key.end(), [](char c) { return c >= ' ' && c <= '~' && c != '='; });
}

bool valid_choice(TuningChoice choice) {
  return choice.candidate >= 0 && choice.candidate < choice.candidates &&
         choice.candidates <= TuningTable::kMostCandidates;
}

bool parse_number(std::string_view text, int& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

std::optional<TuningChoice> parse_choice(std::string_view text) {
  const std::size_t slash = text.find('/');
  TuningChoice choice;
  if (slash == std::string_view::npos || !parse_number(text.substr(0, slash), choice.candidate) ||
      !parse_number(text.substr(slash + 1), choice.candidates) || !valid_choice(choice)) {
    return std::nullopt;
  }
  return choice;
}

/// The whole file, or nothing where it cannot be read or is no file of ours.
std::string read(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error) || fs::file_size(path, error) > kMostFileBytes || error) return {};
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return file ? std::move(text).str() : std::string();
}

fs::path default_file() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return fs::path(value ? value : "");
  };
  if (const fs::path named = variable("ROWAN_TUNE_FILE"); !named.empty()) return named;
  if (const fs::path cache = variable("XDG_CACHE_HOME"); cache.is_absolute()) return cache / "rowan" / "tuning.txt";
  if (const fs::path home = variable("HOME"); home.is_absolute()) return home / ".cache" / "rowan" / "tuning.txt";
  return {};
}

bool on_by_default() {
  const char* const value = std::getenv("ROWAN_TUNE");
  return value == nullptr || std::string_view(value) != "0";
}

}  // namespace

std::optional<TuningChoice> TuningTable::find(std::string_view key) const {
  const auto found = choices_.find(key);
  if (found == choices_.end()) return std::nullopt;
  return found->second;
}

void TuningTable::put(std::string_view key, TuningChoice choice) {
  if (!valid_key(key) || !valid_choice(choice)) return;
  if (const auto found = choices_.find(key); found != choices_.end()) {
    found->second = choice;
  } else if (choices_.size() < kMostChoices) {
    choices_.emplace(key, choice);
  }
}

void TuningTable::merge(std::string_view text) {
  bool first = true;
  while (!text.empty()) {
    const std::size_t length = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    if (first && line != kHeader) return;
    first = false;
    const std::size_t equals = line.find(kEquals);
    if (equals == std::string_view::npos) continue;
    const std::string_view key = line.substr(0, equals);
    const auto choice = parse_choice(line.substr(equals + kEquals.size()));
    if (choice && !find(key)) put(key, *choice);
  }
}

std::string TuningTable::text() const {
  std::string text(kHeader);
  text += '\n';
  for (const auto& [key, choice] : choices_)
    text += fmt::format("{}{}{}/{}\n", key, kEquals, choice.candidate, choice.candidates);
  return text;
}

Tuning& Tuning::process() {
  static auto& tuning = *new Tuning(on_by_default(), default_file());  // products may run while the process ends
  return tuning;
}

Tuning::Tuning(bool on, fs::path file) : on_(on), file_(std::move(file)) {}

bool Tuning::on() const {
  const std::lock_guard lock(mutex_);
  return on_;
}

void Tuning::set_on(bool on) {
  const std::lock_guard lock(mutex_);
  on_ = on;
}

bool Tuning::measures() const {
  const std::lock_guard lock(mutex_);
  return on_ && measures_;
}

void Tuning::adopt(std::string_view text) {
  const std::lock_guard lock(mutex_);
  table_ = TuningTable();
  table_.merge(text);
  file_.clear();
  loaded_ = true;
  measures_ = false;
}

void Tuning::set_file(const fs::path& file) {
  const std::lock_guard lock(mutex_);
  file_ = file;
  loaded_ = false;
  if (on_) load();
}

std::optional<TuningChoice> Tuning::find(std::string_view key) {
  const std::lock_guard lock(mutex_);
  if (!on_) return std::nullopt;
  load();
  return table_.find(key);
}

void Tuning::put(std::string_view key, TuningChoice choice) {
  const std::lock_guard lock(mutex_);
  table_.put(key, choice);
  if (on_) save();
}

std::string Tuning::text() {
  const std::lock_guard lock(mutex_);
  if (on_) load();
  return table_.text();
}

void Tuning::merge(std::string_view text) {
  const std::lock_guard lock(mutex_);
  table_.merge(text);
}

void Tuning::load() {
  if (loaded_) return;
  loaded_ = true;
  if (!file_.empty()) table_.merge(read(file_));
}

void Tuning::save() noexcept {
  if (file_.empty()) return;
  try {
    TuningTable all = table_;
    all.merge(read(file_));  // what other processes have added since
    std::error_code error;
    if (file_.has_parent_path()) fs::create_directories(file_.parent_path(), error);
    static std::atomic<unsigned> number{0};
    fs::path temporary = file_;
    temporary += fmt::format(".{}.{}.tmp", getpid(), number++);
    std::ofstream out(temporary, std::ios::binary);
    out << all.text();
    out.close();
    if (out) {
      fs::rename(temporary, file_, error);
    }
    if (!out || error) fs::remove(temporary, error);
  } catch (...) {  // a cache: what cannot be stored is measured again next time
  }
}

void set_tuning(bool on) { Tuning::process().set_on(on); }
void set_tuning_file(const fs::path& path) { Tuning::process().set_file(path); }
std::string export_tuning() { return Tuning::process().text(); }
void import_tuning(std::string_view choices) { Tuning::process().merge(choices); }
void adopt_tuning(std::string_view choices) { Tuning::process().adopt(choices); }

}  // namespace rowan
