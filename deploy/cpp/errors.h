#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace rayrec {

// An export that is damaged, incomplete, or not supported by this build or machine. Names the file or the feature.
struct ExportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What is wrong with one row, or with a column of all rows if `row` is negative.
struct Problem {
  int64_t row = -1;
  std::string column, problem, fix, value;

  std::string text() const {
    std::string where;
    if (row >= 0) where = "row " + std::to_string(row);
    if (!column.empty()) where += (where.empty() ? "column '" : ", column '") + column + "'";
    if (!value.empty()) where += ", value " + value;
    return problem + (where.empty() ? "" : " (" + where + ")") + (fix.empty() ? "" : "; fix: " + fix);
  }
};

// A request that cannot be scored, with the rows at fault.
struct RequestError : std::runtime_error {
  explicit RequestError(const std::string& text, std::vector<Problem> problems = {})
      : std::runtime_error(text), problems(std::move(problems)) {}
  explicit RequestError(Problem problem) : RequestError(problem.text(), {problem}) {}
  std::vector<Problem> problems;
};

}  // namespace rayrec
