//! The rules: one module for each thing that can happen, each with its truth table.

pub mod call;
pub mod claim;
pub mod commit_order;
pub mod lane;
pub mod operator;
pub mod purge;
pub mod receive;
pub mod register;
pub mod settle;
