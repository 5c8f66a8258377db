// What may go wrong, as types.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace rayrec {

// A folder that is no whole export, or does not fit this machine or server; the text names the file, or the feature.
struct ExportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What is wrong with one row, or, where `row` is negative, with a column of all rows.
struct Problem {
  int64_t row = -1;
  std::string column, problem, fix, value;

  std::string text() const {
    std::string places;
    if (row >= 0) places = "row " + std::to_string(row);
    if (!column.empty()) places += (places.empty() ? "column '" : ", column '") + column + "'";
    if (!value.empty()) places += ", value " + value;
    return problem + (places.empty() ? "" : " (" + places + ")") + (fix.empty() ? "" : "; fix: " + fix);
  }
};

// A request that is refused: HTTP status, text, and the rows at fault.
struct Refused : std::runtime_error {
  Refused(int status, const std::string& text, std::vector<Problem> problems = {})
      : std::runtime_error(text), status(status), problems(std::move(problems)) {}
  explicit Refused(Problem problem) : Refused(422, problem.text(), {problem}) {}
  int status;
  std::vector<Problem> problems;
};

}  // namespace rayrec
