#include "model.h"

#include <zlib.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include "file.h"

namespace rayrec {
namespace {

using nlohmann::json;

constexpr int kOldest = 1, kNewest = 2;  // formats of export.json

json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw ExportError(path + " cannot be opened: the folder holds no whole export of today; export the run anew");
  try {
    return json::parse(file);
  } catch (const json::exception& error) {
    throw ExportError(path + ": " + error.what() + "; export the run anew");
  }
}

json read_index(const std::string& folder) {
  json index = read_json(folder + "/export.json");
  const auto format = index.is_object() ? index.find("format") : index.end();
  if (format == index.end() || !format->is_number() || *format < kOldest || *format > kNewest)
    throw ExportError(folder + "/export.json: another format than this build reads; export the run anew");
  return index;
}

// The flags of this machine's processor.
std::set<std::string> flags_here() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

// That the compiled graph was made by this torch, for processors like this one: another one may end the process.
void check_compiled(const std::string& folder, const json& index) {
  const std::string torch = index.at("versions").at("torch");
  if (torch.substr(0, torch.find('+')) != TORCH_VERSION)
    throw ExportError(folder + " was compiled with torch " + torch + ", this server with " TORCH_VERSION
                      ": export it with that torch, or build the server anew");
  if (index.value("march", json()).is_null())
    throw ExportError(folder + " was compiled by an earlier rayrec, which did not record for which processors: export the run anew");
  const std::set<std::string> here = flags_here();
  std::string lacks;
  for (const std::string flag : index["instructions"])
    if (!here.contains(flag)) lacks += " " + flag;
  if (!lacks.empty())
    throw ExportError(folder + " was compiled for " + index.value("march", json("other")).dump() + " processors, this one lacks" + lacks +
                      ": export it for this machine");
}

// One request's rows, or those of several, as the graph takes them.
struct Joined {
  std::vector<float> dense, weights;
  std::vector<int64_t> offsets, ids;
};

}  // namespace

std::string version_of(const std::string& folder) {
  const json index = read_index(folder);
  const auto version = index.find("version");
  if (version == index.end() || !version->is_string()) throw ExportError(folder + "/export.json: no version; export the run anew");
  return *version;
}

struct Model::State {
  explicit State(const std::string& folder) : mapping(folder) {}

  Mapping mapping;
  std::string version;
  std::vector<std::string> labels;
  std::vector<size_t> places;    // of each key of the graph among the mapping's features
  std::vector<uint8_t> shared;   // which of them the graph takes once for all rows
  std::vector<int64_t> rows_of;  // every id lies below
  int64_t num_dense = 0;
  bool weighted = false;
  bool has_context = false;  // the graph takes a row of bags before the others, which belongs to all of them
  std::unique_ptr<MappedFile> tables;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader;

  void check(const std::string& folder) const {
    if (num_dense != mapping.num_dense() || weighted != mapping.weighted() || places.size() != mapping.sparse().size())
      throw ExportError(folder + ": mapping.json has other features than the graph; export the run anew");
  }

  Joined join(std::span<const Mapped* const> parts) const {
    int64_t rows = 0;
    for (const Mapped* part : parts) rows += part->rows;
    Joined made;
    made.dense.resize(static_cast<size_t>(rows * num_dense));
    float* to = made.dense.data();
    for (const Mapped* part : parts)
      for (int64_t row = 0; row < part->rows; ++row)
        for (size_t i = 0; i < part->dense.size(); ++i) {
          const size_t width = mapping.dense()[i].width;
          const float* from = part->dense[i].values.data() + (part->dense[i].shared ? 0 : static_cast<size_t>(row) * width);
          to = std::copy(from, from + width, to);
        }
    made.offsets.reserve(places.size() * static_cast<size_t>(rows + 1) + 1);
    made.offsets.push_back(0);
    auto add = [&](const Bags& bags, size_t bag) {
      const auto first = bags.offsets[bag], last = bags.offsets[bag + 1];
      made.ids.insert(made.ids.end(), bags.ids.begin() + first, bags.ids.begin() + last);
      if (!weighted) return;
      if (bags.weights.empty()) made.weights.resize(made.ids.size(), 1.0f);
      else made.weights.insert(made.weights.end(), bags.weights.begin() + first, bags.weights.begin() + last);
    };
    auto close = [&] { made.offsets.push_back(static_cast<int64_t>(made.ids.size())); };
    for (size_t key = 0; key < places.size(); ++key) {
      const bool once = has_context && shared[key] && parts.size() == 1 && parts[0]->sparse[places[key]].shared;
      if (has_context) {
        if (once) add(parts[0]->sparse[places[key]], 0);
        close();
      }
      for (const Mapped* part : parts) {
        const Bags& bags = part->sparse[places[key]];
        for (int64_t row = 0; row < part->rows; ++row) {
          if (!once) add(bags, bags.shared ? 0 : static_cast<size_t>(row));
          close();
        }
      }
      for (auto id = made.ids.begin() + made.offsets[made.offsets.size() - 1 - static_cast<size_t>(rows) - has_context]; id != made.ids.end(); ++id)
        if (*id < 0 || *id >= rows_of[key]) throw std::logic_error("an id is outside its table");  // or the kernel reads elsewhere
    }
    return made;
  }
};

Model::Model(const std::string& folder, size_t runners, bool checksums) {
  json index = read_index(folder);
  try {
    check_compiled(folder, index);
    const auto& targets = index.at("targets");
    if (std::find(targets.begin(), targets.end(), "aoti") == targets.end())
      throw ExportError(folder + " holds no compiled graph: export with --target aoti");
    for (const auto& [name, file] : index.at("files").items()) {
      if (name.find("..") != std::string::npos || name.starts_with("/"))
        throw ExportError(folder + "/export.json names a file outside the folder");
      const std::string path = folder + "/" + name;
      MappedFile data(path);
      if (data.size() != file.at(0).get<size_t>())
        throw ExportError(path + " has another size than when it was exported: copy it again");
      if (checksums && crc32_z(0, static_cast<const Bytef*>(data.data()), data.size()) != file.at(1).get<uint64_t>())
        throw ExportError(path + " is damaged, its checksum is another: copy it again");
    }
    state_ = std::make_unique<State>(folder);
    const json& inputs = index.at("inputs");
    const std::vector<SparseFeature>& features = state_->mapping.sparse();
    const json context = inputs.value("context", json());
    state_->has_context = !context.is_null();
    for (const std::string key : inputs.at("keys")) {
      const auto found = std::find_if(features.begin(), features.end(), [&](const SparseFeature& one) { return one.name == key; });
      if (found == features.end()) throw ExportError(folder + ": mapping.json lacks feature " + key + "; export the run anew");
      state_->places.push_back(static_cast<size_t>(found - features.begin()));
      state_->rows_of.push_back(index.at("rows_of").at(key).get<int64_t>());
      state_->shared.push_back(state_->has_context && std::find(context.begin(), context.end(), key) != context.end());
    }
    state_->version = index.at("version");
    state_->num_dense = inputs.at("num_dense").get<int64_t>();
    const json kinds = inputs.value("kinds", json());
    if (std::find(kinds.begin(), kinds.end(), "number") != kinds.end())
      throw ExportError(folder + " predicts a number, and this server answers probabilities: use `rayrec serve`");
    state_->labels = inputs.at("labels").is_null() ? std::vector<std::string>{"label"} : inputs.at("labels").get<std::vector<std::string>>();
    state_->weighted = inputs.at("weighted").get<bool>();
    state_->check(folder);
  } catch (const json::exception& error) {
    throw ExportError(folder + "/export.json: " + error.what() + "; export the run anew");
  }
  state_->tables = std::make_unique<MappedFile>(folder + "/tables.bin");
  try {
    state_->loader = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
        folder + "/aoti", "model", false, runners, static_cast<c10::DeviceIndex>(-1));
  } catch (const std::exception& error) {
    throw ExportError(folder + "/aoti cannot be loaded by this torch: " + error.what());
  }
}

Model::~Model() = default;

std::vector<float> Model::score(std::span<const Mapped* const> parts) const {
  int64_t rows = 0;
  for (const Mapped* part : parts) rows += part->rows;
  if (rows == 0) return {};
  Joined joined = state_->join(parts);
  c10::InferenceMode guard;
  auto view = [](auto& numbers, at::IntArrayRef shape, at::ScalarType kind) { return at::from_blob(numbers.data(), shape, at::TensorOptions(kind)); };
  std::vector<at::Tensor> inputs{
      view(joined.dense, {rows, state_->num_dense}, at::kFloat),
      view(joined.ids, {static_cast<int64_t>(joined.ids.size())}, at::kLong),
      view(joined.offsets, {static_cast<int64_t>(joined.offsets.size())}, at::kLong),
      // torch reads inputs only; it has no tensor of constant data
      at::from_blob(state_->tables->data(), {static_cast<int64_t>(state_->tables->size())}, at::TensorOptions(at::kByte)),
  };
  if (state_->weighted) inputs.push_back(view(joined.weights, {static_cast<int64_t>(joined.weights.size())}, at::kFloat));
  at::Tensor scores = state_->loader->run(inputs)[0].sigmoid().contiguous();
  const float* first = scores.data_ptr<float>();
  return {first, first + scores.numel()};
}

void use_cores(int count) { at::set_num_threads(count); }

const std::string& Model::version() const { return state_->version; }
const Mapping& Model::mapping() const { return state_->mapping; }
const std::vector<std::string>& Model::labels() const { return state_->labels; }

std::shared_ptr<const Model> load_to_serve(const std::string& folder, size_t runners, int cores) {
  use_cores(cores);  // of this thread
  auto model = std::make_shared<Model>(folder, runners);
  const json parity = read_json(folder + "/parity.json");
  if (!parity.is_object() || parity.value("within_limits", json()) != json(true))
    throw ExportError(folder + ": its scores are outside their limits, or nobody compared them; export it anew");
  Mapped row;
  row.rows = 1;
  for (const DenseFeature& one : model->mapping().dense()) row.dense.push_back({false, std::vector<float>(one.width)});
  for (const SparseFeature& one : model->mapping().sparse())
    row.sparse.push_back({false, {0}, {0, 1}, one.kind == SparseFeature::Kind::Weighted ? std::vector<float>{1} : std::vector<float>()});
  const Mapped* rows[] = {&row};
  for (float score : model->score(rows))
    if (!std::isfinite(score)) throw ExportError(folder + ": a row of zeros scores no number; look at its training");
  constexpr int many = 100;
  const auto least_ms = [&](std::span<const Mapped* const> parts) {
    double least = INFINITY;
    for (int i = 0; i < 5; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      model->score(parts);
      least = std::min(least, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
    return least;
  };
  const double one_ms = least_ms(rows);
  model->pace.row_ms = std::max(1e-6, (least_ms(std::vector<const Mapped*>(many, &row)) - one_ms) / (many - 1));
  model->pace.call_ms = std::max(0.0, one_ms - model->pace.row_ms);
  return model;
}

}  // namespace rayrec
