// The place of a block in the grid: sections of outer indices (all axes but the first), the last with what is left over. In a section
// the outer indices of the last inner one (the first axis) come first: the longest blocks, where blocks further along are longer.
struct Place {
  int inner, outer;
};
struct Sections {
  u32 section, num_sections, num_first, num_rest;
  DEVICE Place at(u32 block) const {
    const u32 per = section * num_first, k = min(block / per, num_sections - 1), rem = block - k * per;
    const u32 width = k == num_sections - 1 ? num_rest - k * section : section, inner = rem / width;
    return Place{(int)(num_first - 1 - inner), (int)(k * section + rem - inner * width)};
  }
};
