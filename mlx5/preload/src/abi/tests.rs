//! Compares the structures with the kernel's headers, as the system's compiler lays them out.

use std::fmt::Write as _;
use std::process::Command;

#[test]
#[ignore = "needs linux-libc-dev and a C compiler"]
fn structures_are_those_of_the_headers() {
    let mut source = String::from(
        "#include <stddef.h>\n#include <rdma/ib_user_verbs.h>\n#include <rdma/mlx5-abi.h>\n#include <rdma/rdma_user_cm.h>\n",
    );
    let mut checks = 0;
    for (name, size, fields) in
        [super::verbs::LAYOUT, super::mlx5::LAYOUT, super::cm::LAYOUT].concat()
    {
        writeln!(
            source,
            "_Static_assert(sizeof(struct {name}) == {size}, \"{name}\");"
        )
        .unwrap();
        for (field, offset) in fields {
            writeln!(
                source,
                "_Static_assert(offsetof(struct {name}, {field}) == {offset}, \"{name}.{field}\");"
            )
            .unwrap();
            checks += 1;
        }
    }
    assert!(checks > 300, "{checks}");
    let file = std::env::temp_dir().join(format!("mlx5-preload-abi-{}.c", std::process::id()));
    std::fs::write(&file, source).unwrap();
    let output = Command::new("cc")
        .args(["-std=gnu11", "-fsyntax-only"])
        .arg(&file)
        .output()
        .expect("cc");
    std::fs::remove_file(&file).unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
