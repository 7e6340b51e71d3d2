// The place of a block in the grid: sections of outer indices (all axes but the first), the last with what is left over. In a section
// the outer indices of the last inner one (the first axis) come first: the longest blocks, where blocks further along are longer.
struct Place {
  int inner, outer;
};
struct Sections {
  int section, num_sections, num_first, num_rest;
  DEVICE Place at(int block) const {
    const int per = section * num_first, k = min(block / per, num_sections - 1), rem = block - k * per;
    const int width = k == num_sections - 1 ? num_rest - k * section : section, inner = rem / width;
    return Place{num_first - 1 - inner, k * section + rem - inner * width};
  }
};
