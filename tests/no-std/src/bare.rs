//! The floor under the program: its entry, its console, its heap, and the four functions that
//! compiled code calls for memory.
//!
//! This is what a board's support crate is on a device. It is the one place where `unsafe` is
//! allowed, since nothing of this can be said without it; x86-64 Linux.
#![allow(unsafe_code, reason = "there is no runtime below that would do it")]

use core::alloc::{GlobalAlloc, Layout};
use core::arch::{asm, naked_asm};
use core::fmt;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicUsize, Ordering};

use linked_list_allocator::LockedHeap;

use crate::HEAP;

/// The largest number of bytes that were in use at one time.
pub(crate) fn peak() -> usize {
    ALLOCATOR.peak.load(Ordering::Relaxed)
}

/// Standard output.
pub(crate) struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            // SAFETY: the kernel reads `rest.len()` bytes of `rest`, and writes nothing.
            let written = unsafe { system_call(1, 1, rest.as_ptr() as usize, rest.len()) };
            match usize::try_from(written) {
                Ok(written) if written > 0 => rest = &rest[written.min(rest.len())..],
                Ok(_) | Err(_) => return Err(fmt::Error),
            }
        }
        Ok(())
    }
}

/// # Safety
///
/// As the system call of this number with these arguments.
unsafe fn system_call(number: usize, first: usize, second: usize, third: usize) -> isize {
    let result;
    // SAFETY: the registers are those of the system's convention; `syscall` changes rax, rcx and
    // r11 alone.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") first, in("rsi") second, in("rdx") third,
            out("rcx") _, out("r11") _, options(nostack));
    }
    result
}

fn exit(code: i32) -> ! {
    loop {
        // SAFETY: 231 ends the process; there is nothing that it could break.
        unsafe { system_call(231, code as usize, 0, 0) };
    }
}

/// Where the kernel begins: with a stack, and no return address on it.
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn _start() -> ! {
    naked_asm!("xor ebp, ebp", "and rsp, -16", "call {start}", "ud2", start = sym start)
}

extern "C" fn start() -> ! {
    static mut MEMORY: [u8; HEAP] = [0; HEAP];
    // SAFETY: this runs once, before anything is allocated, and nothing else names the memory.
    unsafe { ALLOCATOR.heap.lock().init((&raw mut MEMORY).cast(), HEAP) };
    exit(crate::run())
}

#[panic_handler]
fn panicked(info: &PanicInfo<'_>) -> ! {
    let _ = fmt::Write::write_fmt(&mut Console, format_args!("{info}\n"));
    exit(101)
}

/// A heap of fixed size, and the most of it that was in use.
struct Counted {
    heap: LockedHeap,
    peak: AtomicUsize,
}

#[global_allocator]
static ALLOCATOR: Counted = Counted { heap: LockedHeap::empty(), peak: AtomicUsize::new(0) };

// SAFETY: it hands on what `LockedHeap` gives and takes.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promised.
        let memory = unsafe { self.heap.alloc(layout) };
        // What the heap takes for it, its rounding included.
        self.peak.fetch_max(self.heap.lock().used(), Ordering::Relaxed);
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { self.heap.dealloc(memory, layout) };
    }
}

// Compiled code calls these by name. They are written as string instructions, so that they are not
// compiled into calls of themselves.

/// # Safety
///
/// `length` bytes at `from` can be read, and at `to` written; they do not overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: as the caller promised.
    unsafe {
        asm!("rep movsb", inout("rcx") length => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    to
}

/// # Safety
///
/// `length` bytes at `from` can be read, and at `to` written.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= length {
        // SAFETY: `to` lies before `from` or behind its end, so that copying upwards reads each
        // byte before it is overwritten.
        return unsafe { memcpy(to, from, length) };
    }
    // SAFETY: as the caller promised; downwards, each byte is read before it is overwritten.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") length => _, inout("rdi") to.wrapping_add(length).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(length).wrapping_sub(1) => _, options(nostack));
    }
    to
}

/// # Safety
///
/// `length` bytes at `to` can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, length: usize) -> *mut u8 {
    // SAFETY: as the caller promised.
    unsafe {
        asm!("rep stosb", inout("rcx") length => _, inout("rdi") to => _, in("al") value as u8,
            options(nostack, preserves_flags));
    }
    to
}

/// # Safety
///
/// `length` bytes at both can be read.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
    for at in 0..length {
        // SAFETY: as the caller promised. Volatile, so that the loop is not compiled into a call of
        // itself.
        let (left, right) =
            unsafe { (left.add(at).read_volatile(), right.add(at).read_volatile()) };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
    }
    0
}

/// # Safety
///
/// As [`memcmp`].
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
    // SAFETY: as the caller promised.
    unsafe { memcmp(left, right, length) }
}
