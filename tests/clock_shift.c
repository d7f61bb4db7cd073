/* Loaded into a process with LD_PRELOAD: shifts its clock of the day by as many seconds as a file says at that moment.

   Go's runtime, and so nats-server, asks the kernel's vDSO for the time without any library in between, which is why tools that replace
   functions of the C library (libfaketime) have no effect on it. Here the function in the vDSO itself, of which each process has a
   copy of its own once it is written to, is replaced. Time that only goes forward (CLOCK_MONOTONIC) is left alone, as when somebody
   sets a machine's clock. x86-64 alone. */
#define _GNU_SOURCE
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *shift;

/* Called on whatever small stack a thread of Go's has at the time: no library, nothing large. */
static long shifted(clockid_t clock, struct timespec *at) {
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"((long)SYS_clock_gettime), "D"((long)clock), "S"(at) : "rcx", "r11", "memory");
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) at->tv_sec += *shift;
  return result;
}

static void fail(const char *what) {
  perror(what);
  _exit(97);
}

static unsigned char *find(const char *name) {
  uintptr_t base = getauxval(AT_SYSINFO_EHDR);
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)base;
  const Elf64_Phdr *parts = (const Elf64_Phdr *)(base + header->e_phoff);
  const Elf64_Dyn *dynamic = NULL;
  uintptr_t loaded = base;
  for (int at = 0; at < header->e_phnum; at++) {
    if (parts[at].p_type == PT_LOAD) loaded = base + parts[at].p_offset - parts[at].p_vaddr;
    if (parts[at].p_type == PT_DYNAMIC) dynamic = (const Elf64_Dyn *)(base + parts[at].p_offset);
  }
  const Elf64_Sym *symbols = NULL;
  const char *names = NULL;
  for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
    if (dynamic->d_tag == DT_SYMTAB) symbols = (const Elf64_Sym *)(loaded + dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_STRTAB) names = (const char *)(loaded + dynamic->d_un.d_ptr);
  }
  /* The names follow the symbols in every vDSO of Linux. */
  for (const Elf64_Sym *symbol = symbols; symbols && (const char *)symbol < names; symbol++)
    if (strcmp(names + symbol->st_name, name) == 0) return (unsigned char *)(loaded + symbol->st_value);
  return NULL;
}

__attribute__((constructor)) static void replace(void) {
  const char *path = getenv("CLOCK_SHIFT");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) fail("CLOCK_SHIFT");
  shift = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
  if (shift == MAP_FAILED) fail("CLOCK_SHIFT");
  close(file);
  unsigned char *function = find("__vdso_clock_gettime");
  if (!function) fail("no clock_gettime in the vDSO");
  unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0}; /* mov rax, shifted; jmp rax */
  uintptr_t to = (uintptr_t)shifted, page = (uintptr_t)function & ~(uintptr_t)4095;
  memcpy(jump + 2, &to, sizeof to);
  if (mprotect((void *)page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) && mprotect((void *)page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC))
    fail("the vDSO cannot be written to");
  memcpy(function, jump, sizeof jump);
}
