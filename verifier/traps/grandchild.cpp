// Leaves a child of its own behind that does not listen to SIGTERM.
#include <signal.h>
#include <unistd.h>

extern "C" int32_t attention_kernel(const FarmCall* raw) {
  if (fork() == 0) {
    signal(SIGTERM, SIG_IGN);
    for (;;) sleep(1);
  }
  return attention(Call(raw));
}
