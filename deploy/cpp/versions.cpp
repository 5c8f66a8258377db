#include "versions.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

namespace rayrec {
namespace {

namespace fs = std::filesystem;

// Before a refused version is read again as it is: the reason may have passed.
constexpr std::chrono::seconds kWait{10}, kLongestWait{3600};

// Names in order, numbers in them by their value and before text: as the service in Python.
bool before(const std::string& one, const std::string& other) {
  auto digit = [](char letter) { return letter >= '0' && letter <= '9'; };
  size_t i = 0, j = 0;
  while (i < one.size() && j < other.size()) {
    if (digit(one[i]) != digit(other[j])) return digit(one[i]);
    if (!digit(one[i])) {
      if (one[i] != other[j]) return static_cast<unsigned char>(one[i]) < static_cast<unsigned char>(other[j]);
      ++i, ++j;
      continue;
    }
    auto number = [&](const std::string& text, size_t& at) {
      const size_t first = std::min(text.find_first_not_of('0', at), text.size());
      for (at = first; at < text.size() && digit(text[at]);) ++at;
      return text.substr(first, at - first);
    };
    const std::string a = number(one, i), b = number(other, j);
    if (a != b) return a.size() != b.size() ? a.size() < b.size() : a < b;
  }
  return i == one.size() && j == other.size() ? one < other : i == one.size();
}

// Every file's path, bytes, and time of its last change.
std::string files_of(const fs::path& folder) {
  std::ostringstream found;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file())
      found << entry.path() << ' ' << entry.file_size() << ' ' << entry.last_write_time().time_since_epoch().count() << ' ';
  return found.str();
}

}  // namespace

std::string newest(const std::string& given) {
  if (given.find("://") != std::string::npos)
    throw ExportError(given + " is a URI, and this server reads folders here: copy the export, or use `rayrec serve`");
  const fs::path path(given);
  if (fs::exists(path / "export.json")) return fs::canonical(path);
  std::ifstream current(path / "current");
  std::string name;
  if (current >> name) {
    if (name.find('/') != std::string::npos || name == "..")
      throw ExportError((path / "current").string() + " must name a folder beside it");
    return fs::canonical(path / name);
  }
  fs::path last;
  if (fs::is_directory(path))
    for (const auto& entry : fs::directory_iterator(path))
      if (fs::exists(entry.path() / "export.json") && (last.empty() || before(last.filename(), entry.path().filename())))
        last = entry.path();
  if (last.empty()) throw ExportError(path.string() + " holds no export");
  return fs::canonical(last);
}

Versions::Versions(std::string path, size_t runners, int cores, std::chrono::milliseconds pause)
    : path_(std::move(path)), runners_(runners), cores_(cores), pause_(pause), model_(load_to_serve(newest(path_), runners, cores)),
      refused_(std::make_shared<const std::string>()) {}

std::string Versions::refused() const { return *refused_.load(); }

void Versions::watch(const std::atomic<bool>& stop, const std::function<void(bool)>& changed) {
  using Clock = std::chrono::steady_clock;
  std::string files, refused;
  Clock::time_point again;
  std::chrono::seconds wait = kWait;
  while (!stop) {
    std::this_thread::sleep_for(pause_);
    try {
      files.clear();
      const std::string folder = newest(path_);
      if (version_of(folder) == take()->version()) {
        refused_.store(std::make_shared<const std::string>());
        continue;
      }
      files = files_of(folder);
      if (files == refused && Clock::now() < again) continue;  // reading all of it again would find the same
      model_.store(load_to_serve(folder, runners_, cores_));
      refused_.store(std::make_shared<const std::string>());
      std::cerr << "serving " << take()->version() << std::endl;
      changed(true);
    } catch (const std::exception& error) {  // the old version answers
      wait = files == refused ? std::min(2 * wait, kLongestWait) : kWait;
      refused = files;
      again = Clock::now() + wait;
      if (*refused_.load() == error.what()) continue;
      refused_.store(std::make_shared<const std::string>(error.what()));
      std::cerr << "refused: " << error.what() << std::endl;
      changed(false);
    }
  }
}

}  // namespace rayrec
