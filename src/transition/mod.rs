//! The rules: one module for each thing that can happen, each with its truth table.

pub mod call;
pub(crate) mod claim;
pub(crate) mod commit_order;
pub(crate) mod end_leases;
pub(crate) mod operator;
pub(crate) mod purge;
pub(crate) mod receive;
pub(crate) mod register;
pub(crate) mod settle;
