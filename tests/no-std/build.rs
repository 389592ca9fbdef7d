//! Links the program statically, with no start-up code and no C library.

fn main() {
    let bare = ["-nostartfiles", "-nostdlib", "-static", "-no-pie"];
    // The compiled `alloc` names what it would unwind with. Nothing unwinds here, so nothing is
    // there.
    let no_unwinding = ["-Wl,--defsym=rust_eh_personality=0", "-Wl,--defsym=_Unwind_Resume=0"];
    for arg in bare.iter().chain(&no_unwinding) {
        println!("cargo::rustc-link-arg-bins={arg}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
