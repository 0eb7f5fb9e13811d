//! Reader of footers: from the last page, as many pages at once as fit in a buffer.

use crate::config::TierConfig;
use crate::device::{Device, Owner};
use crate::format::FooterPage;
use crate::memory::{Memory, Span};
use crate::ops::{Pieces, Priority};

/// Pages of a segment's footer that are read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FooterWindow {
    pub(crate) segment: u32,
    /// First page, and number of pages.
    first: u32,
    count: u32,
    /// Number of pages of the footer, once page 0 is known.
    pages: u32,
    /// Offset of the buffer in the staging area.
    buffer: u64,
}

impl FooterWindow {
    /// Returns the first window of a segment's footer.
    pub(crate) fn begin(segment: u32, buffer: u64, config: &TierConfig) -> Self {
        Self { segment, first: 0, count: most(config).min(config.footer_pages), pages: 0, buffer }
    }

    pub(crate) const fn first(&self) -> u32 {
        self.first
    }

    /// Returns the window that begins with this page of the footer.
    fn from(self, page: u32, config: &TierConfig) -> Self {
        Self { first: page, count: most(config).min(self.pages - page), ..self }
    }

    /// Returns the page or window that follows a processed page.
    pub(crate) fn after(self, page: u32, config: &TierConfig) -> NextPage {
        if page + 1 == self.pages {
            NextPage::None
        } else if page + 1 == self.first + self.count {
            NextPage::Window(self.from(page + 1, config))
        } else {
            NextPage::Here(page + 1)
        }
    }

    /// Submits the read of the window: its pages lie in the buffer in the device's order, the last one first.
    pub(crate) fn read(&self, owner: Owner, device: &mut Device) {
        let bytes = self.count * device.config().footer_page_bytes;
        let offset = device.page_at(self.segment, self.first + self.count - 1);
        device.read(owner, offset, Pieces::of(&[Span::staging(self.buffer, bytes)]), Priority::Background);
    }

    /// Verifies a page of a window that was read, and copies it into `bytes`. Returns `None` if it is not a page of the
    /// segment's footer in this generation.
    pub(crate) fn load(
        &mut self,
        page: u32,
        generation: u64,
        bytes: &mut Vec<u8>,
        device: &Device,
        memory: &dyn Memory,
    ) -> Option<FooterPage> {
        let page_bytes = device.config().footer_page_bytes;
        let at = self.buffer + u64::from(self.first + self.count - 1 - page) * u64::from(page_bytes);
        bytes.resize(page_bytes as usize, 0);
        memory.read(Span::staging(at, page_bytes), bytes);
        let found = FooterPage::decode(bytes, device.uuid()).ok()?;
        let fits = found.segment == self.segment
            && found.generation == generation
            && found.page == page
            && found.pages <= device.config().footer_pages;
        if !fits {
            return None;
        }
        self.pages = found.pages;
        Some(found)
    }
}

/// Continuation after a page of a footer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NextPage {
    /// Another page of the window.
    Here(u32),
    /// Another window, which must be read first.
    Window(FooterWindow),
    /// The footer has no more pages.
    None,
}

fn most(config: &TierConfig) -> u32 {
    config.scan_bytes / config.footer_page_bytes
}
