//! stub
/// x
#[doc(hidden)]
#[macro_export]
macro_rules! each_contract {
    ($callback:path, $($given:tt)*) => {
        $callback! {
            { $($given)* }
        }
    };
}
