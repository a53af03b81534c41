package api

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckMediaType(t *testing.T) {
	t.Parallel()

	const json = "application/json"

	for _, tt := range []struct {
		fact   string
		header http.Header
		want   error
	}{
		{"JSONIsAccepted", http.Header{"Content-Type": {json}}, nil},
		{"TheTypesCaseDoesNotMatter", http.Header{"Content-Type": {"Application/JSON"}}, nil},
		{"UTF8IsAccepted", http.Header{"Content-Type": {"application/json; charset=utf-8"}}, nil},
		{"TheCharsetsCaseDoesNotMatter", http.Header{"Content-Type": {"application/json;Charset=UTF-8"}}, nil},
		{"AQuotedCharsetIsAccepted", http.Header{"Content-Type": {`application/json; charset="utf-8"`}}, nil},
		{"IdentityIsNoCoding", http.Header{"Content-Type": {json}, "Content-Encoding": {"identity"}}, nil},
		{"TheCodingsCaseDoesNotMatter", http.Header{"Content-Type": {json}, "Content-Encoding": {"Identity"}}, nil},
		{"AnEmptyCodingIsNoCoding", http.Header{"Content-Type": {json}, "Content-Encoding": {""}}, nil},

		{"AMissingTypeIsUnsupported", http.Header{}, errMediaTypeUnsupported},
		{"AnEmptyTypeIsUnsupported", http.Header{"Content-Type": {""}}, errMediaTypeUnsupported},
		{"AnotherTypeIsUnsupported", http.Header{"Content-Type": {"text/plain"}}, errMediaTypeUnsupported},
		{"AFormIsUnsupported", http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}, errMediaTypeUnsupported},
		{"TextJSONIsUnsupported", http.Header{"Content-Type": {"text/json"}}, errMediaTypeUnsupported},
		{"ATypeWithTheSuffixJSONIsUnsupported", http.Header{"Content-Type": {"application/problem+json"}}, errMediaTypeUnsupported},
		{"AWildcardIsUnsupported", http.Header{"Content-Type": {"application/*"}}, errMediaTypeUnsupported},
		{"AnotherCharsetIsUnsupported", http.Header{"Content-Type": {"application/json; charset=latin1"}}, errMediaTypeUnsupported},
		{"UTF16IsUnsupported", http.Header{"Content-Type": {"application/json; charset=utf-16"}}, errMediaTypeUnsupported},
		{"UTF8WithoutAHyphenIsUnsupported", http.Header{"Content-Type": {"application/json; charset=utf8"}}, errMediaTypeUnsupported},
		{"AnotherParameterIsUnsupported", http.Header{"Content-Type": {"application/json; version=1"}}, errMediaTypeUnsupported},
		{"TwoDifferentCharsetsAreUnsupported", http.Header{"Content-Type": {"application/json; charset=utf-8; charset=latin1"}}, errMediaTypeUnsupported},
		{"ABrokenParameterIsUnsupported", http.Header{"Content-Type": {"application/json; charset"}}, errMediaTypeUnsupported},
		{"TwoTypesOnOneLineAreUnsupported", http.Header{"Content-Type": {"application/json, application/json"}}, errMediaTypeUnsupported},
		{"TwoLinesAreUnsupported", http.Header{"Content-Type": {json, json}}, errMediaTypeUnsupported},
		{"GzipIsUnsupported", http.Header{"Content-Type": {json}, "Content-Encoding": {"gzip"}}, errContentCodingUnsupported},
		{"AnyCodingInAListIsUnsupported", http.Header{"Content-Type": {json}, "Content-Encoding": {"identity, br"}}, errContentCodingUnsupported},
		{"AnyCodingOnASecondLineIsUnsupported", http.Header{"Content-Type": {json}, "Content-Encoding": {"identity", "gzip"}}, errContentCodingUnsupported},
		{"TheTypeComesBeforeTheCoding", http.Header{"Content-Type": {"text/plain"}, "Content-Encoding": {"gzip"}}, errMediaTypeUnsupported},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			require.ErrorIs(t, checkMediaType(tt.header), tt.want)
		})
	}
}
